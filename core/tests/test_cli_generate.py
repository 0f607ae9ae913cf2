"""`headstock generate` on a small random model and a plain backend of its own, against the library called directly."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from io import TextIOWrapper

import pytest
import torch
from safetensors.torch import save_file

from headstock.cli.main import main
from headstock.engine.generate import Generator
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer as ModelTokenizer
from headstock.models.config import ModelConfig
from headstock.models.shapes import weight_shapes
from headstock.runner.runner import ModelRunner

START = "from headstock.cli.main import main; main()"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
BACKEND = '''
"""Attention one request and head at a time, in float64: slow and plain."""
import pydantic, torch
from headstock import AttentionBackend, Capabilities, Offer, hookimpl, ANY


class Options(pydantic.BaseModel):
    upcast: bool = True


class Plain(AttentionBackend):
    def init_forward_metadata(self, batch):
        batch.metadata = None

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        layer.kv.write(k, v, batch.out_cache_loc)
        size, group = self.spec.page_size, self.spec.num_heads // self.spec.num_kv_heads
        for row in range(batch.num_reqs):
            start, end = batch.query_indptr[row : row + 2].tolist()
            length = int(batch.seq_lens[row])
            at = torch.arange(length)
            keys, values = layer.kv.gather(batch.page_table[row, at // size].long() * size + at % size)
            keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * self.spec.scale
            scores += torch.full((end - start, length), -torch.inf).triu(length - (end - start) + 1)
            out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32", "bfloat16"},
        head_dims={8}, page_sizes={4, 16}, kv_layouts={"nhd"},
    )
    return [Offer(name="plain", aliases=("simple",), backend=Plain, options=Options, capabilities=can)]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory, byte_vocabulary):
    """A model folder with random weights and a tokenizer of bytes; its context holds 64 tokens."""
    folder = tmp_path_factory.mktemp("model")
    byte_vocabulary.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    random = torch.Generator().manual_seed(0)
    shapes = weight_shapes(ModelConfig.from_folder(folder))
    save_file(
        {name: torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Installs the plain backend, as the only plugin that the test sees."""
    module, info = f"plain_{uuid.uuid4().hex}", tmp_path / "site" / "plain_dist-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / f"{module}.py").write_text(BACKEND, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-dist\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[headstock]\nplain = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "plain")


@pytest.fixture
def generate(plain, model, monkeypatch, capsys, tmp_path):
    """Runs `headstock generate` on the model in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        named = [] if "--model" in arguments else ["--model", model]
        monkeypatch.setattr(sys, "argv", ["headstock", "generate", *map(str, [*arguments, *named, "--device", "cpu"])])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def directly(plain, model):
    """What the library says to (text, params) pairs, each alone."""

    def answer(*asked: tuple[str, SamplingParams]) -> list[str]:
        runner, tokenizer = ModelRunner(model, max_batch=1), ModelTokenizer.from_folder(model)
        generator = Generator(runner, tokenizer)
        return [generator.generate([tokenizer.encode(text)], params)[0].text for text, params in asked]

    return answer


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_prompt_is_answered_as_a_chat_or_continued(generate, directly):
    params = SamplingParams(max_tokens=12)
    chat, raw = directly(("<user>Hello<answer>", params), ("Hello", params))
    assert chat != raw
    code, out, err = generate("Hello", "--max-tokens", 12)
    assert (code, out) == (0, chat + "\n")
    for told in (
        "extend, decode: plain (plain-dist 1.0)",
        "the only one that can",
        "page size 16",
        "tokens/s",
        "memory:",
    ):
        assert told in err
    assert generate("Hello", "--raw", "--max-tokens", 12, "--quiet") == (0, raw + "\n", "")


OBSERVER = """

@hookimpl
def on_decision(decision):
    print("an observer decides")

@hookimpl
def before_forward(batch):
    print("an observer before")

@hookimpl
def after_forward(batch):
    print("an observer after")
"""


def test_what_plugins_print_stays_out_of_the_answers(generate, tmp_path):
    [module] = (tmp_path / "site").glob("*.py")
    module.write_text(BACKEND.replace("metadata = None", "metadata = print('a kernel')") + OBSERVER, encoding="utf-8")
    code, out, err = generate("Hello", "--raw", "--max-tokens", 3, "--json")
    assert code == 0
    assert (answer := json.loads(out))["tokens"] == 3
    assert {"an observer decides", "an observer before", "an observer after", "a kernel"} <= set(err.splitlines())
    assert generate("Hello", "--raw", "--max-tokens", 3, "--quiet")[1] == answer["text"] + "\n"


def test_flags_reach_the_sampler(generate, directly):
    flags = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5, "--max-tokens", 20]
    params = SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01, seed=5, max_tokens=20)
    (expected,) = directly(("Once", params))
    assert generate("Once", "--raw", "--quiet", *flags)[1] == expected + "\n"
    assert expected != directly(("Once", SamplingParams(max_tokens=20)))[0]


def test_stop_strings_end_the_text(generate, directly):
    flags = ["--temperature", 2.0, "--seed", 3, "--max-tokens", 40]
    (whole,) = directly(("abc", SamplingParams(temperature=2.0, seed=3, max_tokens=40)))
    stop = next(letter for letter in whole[4:] if letter.isascii() and letter.isprintable() and letter not in whole[:4])
    out = generate("abc", "--raw", "--quiet", *flags, "--stop", stop)[1]
    assert out == whole[: whole.index(stop)] + "\n"


def test_a_file_of_prompts_becomes_a_line_each_in_order(generate, directly, tmp_path):
    texts = [f"prompt {i}" for i in range(5)]
    sampling = [{"max_tokens": 20 - 3 * i, "temperature": 1.0, "seed": i} for i in range(5)]
    records = [{"prompt": text, **own} for text, own in zip(texts, sampling, strict=True)]
    code, out, _ = generate("--prompt-file", jsonl(tmp_path / "in.jsonl", *records), "--raw", "--max-batch", 2)
    lines = [json.loads(line) for line in out.splitlines()]
    expected = directly(*((text, SamplingParams(**own)) for text, own in zip(texts, sampling, strict=True)))
    assert code == 0
    assert [line["text"] for line in lines] == expected
    assert [(line["version"], line["index"], line["prompt"]) for line in lines] == [(1, i, texts[i]) for i in range(5)]
    assert [line["prompt_tokens"] for line in lines] == [8] * 5
    assert {line["finish_reason"] for line in lines} == {"length"}


def test_messages_output_file_and_json(generate, directly, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file, output = jsonl(tmp_path / "in.jsonl", {"messages": messages}), tmp_path / "out.jsonl"
    code, out, _ = generate("--prompt-file", file, "--output", output, "--max-tokens", 5)
    (line,) = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert (code, out, line["messages"]) == (0, "", messages)
    assert [line["text"]] == directly(("<system>Be brief.<user>Hi<answer>", SamplingParams(max_tokens=5)))
    alone = json.loads(generate("Hi", "--json", "--raw", "--max-tokens", 5)[1])
    assert (alone["prompt"], alone["tokens"], alone["error"]) == ("Hi", 5, None)


def test_standard_input(generate, directly, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text("päth", encoding="utf-8")
    with TextIOWrapper((tmp_path / "prompt").open("rb"), encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        _, out, _ = generate("-", "--raw", "--quiet", "--max-tokens", 6)
    assert [out] == [text + "\n" for text in directly(("päth", SamplingParams(max_tokens=6)))]


@pytest.mark.parametrize("encoding", [{"encoding": "utf-8"}, {"encoding": "ascii", "errors": "surrogateescape"}])
def test_standard_input_is_taken_as_it_is(generate, monkeypatch, tmp_path, encoding):
    def lines(content):
        (tmp_path / "prompts").write_bytes(content)
        with TextIOWrapper((tmp_path / "prompts").open("rb"), **encoding) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return generate("--prompt-file", "-", "--raw", "--quiet", "--max-tokens", 1)

    out = lines('\ufeff{"prompt":\r"äh"}\r\n{"prompt": "b"}'.encode())[1]
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["äh", "b"]
    assert refused(lines(b'{"prompt": "\xff"}'), "cannot read standard input")


def test_choices_reach_negotiation_and_their_origin_is_told(generate, tmp_path):
    (tmp_path / "headstock.toml").write_text('page-size = 4\nmax-tokens = 2\ndtype = "bfloat16"\n', encoding="utf-8")
    code, _, err = generate("Hi", "--attention-backend", "Simple")
    assert code == 0
    assert "page size 4, nhd, bfloat16" in err
    assert f"{tmp_path / 'headstock.toml'}: page-size 4" in err
    assert "--attention-backend Simple" in err
    assert "asked for (--attention-backend)" in err
    assert "output 2 tokens" in err


def test_a_decision_pins_a_run(generate, model, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headstock", "explain", "--model", str(model), "--page-size", "4", "--json"])
    with pytest.raises(SystemExit):
        main()
    pinned = tmp_path / "decision.json"
    pinned.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "page size 4" in generate("Hi", "--max-tokens", 1, "--decision", pinned)[2]
    code, out, err = generate("Hi", "--decision", pinned, "--dtype", "bfloat16")
    assert (code, out) == (2, "")
    assert "dtype" in err


WATCHER = """
@hookimpl
def after_forward(batch):
    if batch.num_tokens == 1:
        raise OSError("the disk is full")
"""


def test_what_fails_during_a_run_is_told_at_its_end(generate, tmp_path):
    (path,) = (tmp_path / "site").glob("plain_*.py")
    path.write_text(BACKEND + WATCHER, encoding="utf-8")
    code, _, err = generate("Hi", "--max-tokens", 3)
    *_, speed, notice = err.splitlines()
    assert code == 0
    assert re.search(r"; output 3 tokens, [\d.]+ tokens/s after the first; ", speed)
    assert notice.startswith(
        "notice: after_forward of the plugin plain (plain-dist 1.0) failed and is left out: OSError"
    )
    assert err.count("notice: after_forward") == 1
    assert generate("Hi", "--max-tokens", 3, "--quiet")[2] == ""


def test_options_of_a_backend_that_was_not_chosen_are_told(generate, tmp_path):
    (path,) = (tmp_path / "site").glob("plain_*.py")
    two = "capabilities=can), Offer(name='spare', backend=Plain, options=Options, capabilities=can)]"
    path.write_text(BACKEND.replace("capabilities=can)]", two), encoding="utf-8")
    err = generate("Hi", "--max-tokens", 1, "--backend-option", "spare.upcast=false")[2]
    notice = "notice: the options of spare are not used: another backend was chosen"
    assert err.count(notice) == 1
    code, _, err = generate("Hi", "--max-tokens", 1, "--backend-option", "spare.upcats=false")
    assert (code, err) == (2, "headstock: the backend spare has no option 'upcats'; would work: upcast, perhaps\n")


@pytest.mark.parametrize("error", ["ValueError", "headstock.HeadstockError"])
def test_a_backend_that_fails_in_the_middle_of_a_run_is_a_failure_and_no_refusal(generate, tmp_path, error):
    [module] = (tmp_path / "site").glob("plain_*.py")
    at = "            at = torch.arange(length)\n"
    fails = f"            if length > 20:\n                import headstock; raise {error}('lost a page')\n"
    module.write_text(BACKEND.replace(at, fails + at), encoding="utf-8")
    code, _, err = generate("Hi", "--max-tokens", 30)
    assert code == 1
    last = err.splitlines()[-1]
    assert "a step of plain (plain-dist 1.0) failed: " in last
    assert last.endswith("lost a page; would work: another backend; type: headstock check plain")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Hi", "--stop-token-ids", "99999999"], "stop_token_ids has a token outside the vocabulary; given: 99999999"),
        (["x" * 64, "--raw"], "the prompt leaves no room for an answer; given: 64 tokens in a context of 64"),
        (["x" * 8, "--raw", "--max-context", 8], "or a longer context; type: --max-context 64"),
        (["Hi", "--output", "/no/such/folder/out"], "cannot write /no/such/folder/out: no such folder"),
        (["Hi", "--output", "/"], "cannot write /: it is a folder"),
    ],
)
def test_prompts_and_output_are_checked_before_weights_are_read(generate, model, tmp_path, arguments, told):
    folder = shutil.copytree(model, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert refused(generate(*arguments, "--model", folder), told)
    assert refused(generate("Hi", "--model", folder), "model.safetensors")


def test_an_earlier_output_survives_a_refusal(generate, model, tmp_path):
    folder, output = shutil.copytree(model, tmp_path / "damaged"), tmp_path / "out.jsonl"
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert generate("earlier", "--max-tokens", 1, "--output", output)[0] == 0
    earlier = output.read_bytes()
    assert refused(generate("Hi", "--model", folder, "--output", output), "model.safetensors")
    assert output.read_bytes() == earlier
    assert refused(generate("x" * 40, "--raw", "--kv-tokens", 48, "--output", output), "never fit into the KV cache")
    assert output.read_bytes() == earlier


def test_an_output_replaces_answers_and_nothing_else(generate, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config, made = folder / "config.json", tmp_path / "out.jsonl"
    before = config.read_bytes()
    for more in ([], ["--resume"]):
        outcome = generate("Hi", "--model", folder, "--output", config, *more)
        assert refused(outcome, f"{config}:1 is no answer of this program, and is not written over; given: '{{")
        assert outcome[2].endswith(f"type: --output {config}.answers\n")
        assert config.read_bytes() == before
    assert refused(generate("Hi", "--output", f"{made}/"), f"cannot write {made}/: it is the name of a folder")
    assert not made.exists()
    for prompt in ("one", "two"):
        assert generate(prompt, "--max-tokens", 1, "--output", made)[0] == 0
        assert json.loads(made.read_bytes())["prompt"] == prompt


def test_standard_output_by_its_name_is_a_stream_or_the_file_behind_it(plain, model, tmp_path):
    command = [sys.executable, "-c", START, "generate", "Hi", "--model", model, "--max-tokens", "2", "--device", "cpu"]
    done = subprocess.run([*command, "--output", "/dev/stdout"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["tokens"]) == (0, 2), done.stderr
    (tmp_path / "diary").write_text("a day\n", encoding="utf-8")
    with (tmp_path / "diary").open("a", encoding="utf-8") as diary:
        done = subprocess.run([*command, "--output", "/dev/stdout"], stdout=diary, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, (tmp_path / "diary").read_text(encoding="utf-8")) == (2, "a day\n")
    assert done.stderr.decode().endswith(f"type: --output {tmp_path / 'diary'}.answers\n")


def test_a_pipe_that_is_not_emptied_does_not_outlast_a_second_sigterm(plain, model, tmp_path):
    records = [{"prompt": "x" * 50, "max_tokens": 1}] * 40
    file, pipe = jsonl(tmp_path / "in.jsonl", *records), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    waiting = struct.pack("i", 0)
    process = slow_process(model, tmp_path, "--prompt-file", file, "--output", pipe, stderr=subprocess.DEVNULL)
    until(lambda: struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, waiting))[0] > 3500)
    time.sleep(0.2)  # the next line does not fit
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    os.close(reader)
    assert process.returncode == -signal.SIGTERM


def test_a_run_tells_how_long_answers_took_and_whether_the_cache_was_too_small(generate, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", *({"prompt": f"{i}" * 8, "max_tokens": 40} for i in range(3)))
    err = generate("--prompt-file", file, "--raw", "--kv-tokens", 64, "--page-size", 4)[2]
    assert re.search(r"the first token after \d+\.\d\d s, then one every \d+ ms; \d+ preemptions: the cache", err), err
    assert "preemptions" not in generate("Hi", "--max-tokens", 2)[2]


def test_prompts_are_not_overwritten_with_their_answers(generate, tmp_path):
    file, link = jsonl(tmp_path / "in.jsonl", {"prompt": "one"}), tmp_path / "link"
    link.symlink_to(file)
    before = file.read_bytes()
    for output in (file, link, tmp_path / "." / "in.jsonl"):
        assert refused(generate("--prompt-file", file, "--raw", "--output", output), "is the file of the prompts")
    assert file.read_bytes() == before


def test_a_tokenizer_of_another_model_is_refused(generate, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}), encoding="utf-8")
    assert refused(generate("zz", "--raw", "--model", folder), "the prompt holds a token outside the vocabulary")


def test_options_of_a_backend(generate):
    assert generate("Hi", "--max-tokens", 1, "--backend-option", "simple.upcast=false")[0] == 0
    for option, told in (("plain.upcast=maybe", "upcast"), ("plain.up_cast=1", "upcast"), ("plane.upcast=1", "plain")):
        code, out, err = generate("Hi", "--backend-option", option)
        assert (code, out) == (2, ""), err
        assert told in err


def refused(outcome, told):
    """Whether a run ended with a refusal that tells so much, in at most eight lines and without a traceback."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("headstock: ")
    assert "Traceback" not in err
    assert err.count("\n") <= 8
    return told in err


GOOD_LINE = '{"prompt": "fine"}\n'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--prompt-file FILE"),
        (["Hi", "--prompt-file", "x.jsonl"], "both"),
        ([""], "empty"),
        ([" \n "], "empty"),
        (["Hi", "--temperature", "-0.5"], "--temperature"),
        (["Hi", "--temperature", "nan"], "--temperature"),
        (["Hi", "--temperature", "inf"], "--temperature"),
        (["Hi", "--top-p", "0"], "--top-p"),
        (["Hi", "--top-p", "nan"], "--top-p"),
        (["Hi", "--min-p", "2"], "--min-p"),
        (["Hi", "--top-k", "-1"], "--top-k"),
        (["Hi", "--seed", "-1"], "--seed"),
        (["Hi", "--max-tokens", "0"], "--max-tokens"),
        (["Hi", "--stop", ""], "--stop"),
        (["Hi", "--page-size", "0"], "--page-size"),
        (["Hi", "--page-size", "8"], "page_sizes"),
        (["Hi", "--kv-layout", "hnd"], "kv_layouts"),
        (["Hi", "--kv-dtype", "float8_e4m3fn"], "kv_dtypes"),
        (["Hi", "--dtype", "float16"], "dtypes"),
        (["Hi", "--attention-backend", "plian"], "'plain', perhaps"),
        (["Hi", "--kv-tokens", "0"], "--kv-tokens"),
        (["Hi", "--kv-tokens", "4"], "--kv-tokens"),
        (["Hi", "--max-context", "65"], "at most 64"),
        (["Hi", "--output", "/no/such/folder/out"], "/no/such/folder/out"),
        (["x" * 64, "--raw"], "64 tokens"),
        (["Hi", "--model", "/no/such/model"], "there is no model at /no/such/model"),
        (["Hi", "--model", "loop"], "cannot read loop: Too many levels of symbolic links"),
        (["Hi", "--model", "loop.gguf"], "cannot read loop.gguf: Too many levels of symbolic links"),
        (["Hi", "--model", "x" * 300], "File name too long"),
        (["Hi", "--model", "/dev/null"], "/dev/null is no folder and no .gguf file"),
        (["Hi", "--model", "meta-llama/Llama-3-8B"], "as headstock downloads nothing; or no model named"),
        (["Hi", "--model", "meta-llama/Llama-3-8B"], "type: hf download meta-llama/Llama-3-8B --local-dir"),
        (["--prompt-file", "/no/such/prompts"], "/no/such/prompts"),
    ],
)
def test_bad_flags_are_refused_with_a_cure(generate, tmp_path, arguments, told):
    for loop in ("loop", "loop.gguf"):
        (tmp_path / loop).symlink_to(loop)
    assert refused(generate(*arguments), told)


def test_an_empty_path_is_no_model(generate):
    code, out, err = generate("Hi", "--model", "")
    assert (code, out) == (2, "")
    assert "Invalid value for '--model': given: ''; would work: a path" in err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompt"),
        (GOOD_LINE + "{'prompt': 1}\n", "bad.jsonl:2 is not JSON"),
        (GOOD_LINE + "\n[1]\n", "bad.jsonl:3"),
        (GOOD_LINE + '{"prompt": "  "}', "bad.jsonl:2 is empty"),
        (GOOD_LINE + '{"prompt": 7}', "bad.jsonl:2"),
        ('{"prompt": "a", "messages": []}', "bad.jsonl:1"),
        ('{"messages": []}', "bad.jsonl:1"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "--raw"),
        (GOOD_LINE + '{"prompt": "a", "temperature": -1}', "bad.jsonl:2: temperature"),
        (GOOD_LINE + '{"prompt": "a", "temprature": 1}', "temperature, perhaps"),
        (b"\xff\xfe", "bad.jsonl"),
    ],
)
def test_bad_lines_are_refused_with_their_number(generate, tmp_path, content, told):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(generate("--prompt-file", file, "--raw"), told)


def test_a_prompt_that_the_tokenizer_refuses_is_named_by_its_line(generate, model, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
    assert refused(generate("--prompt-file", file, "--raw"), "bad.jsonl:2: a prompt is not text")
    file.write_bytes(b'{"prompt": "a"}\n\n{"messages": [{"role": 7}]}\n')
    assert refused(generate("--prompt-file", file), "bad.jsonl:3: a chat cannot be read")


def test_a_backend_that_cannot_is_refused_before_torch_is_imported(plain, model, tmp_path):
    manifest = BACKEND[BACKEND.index("@hookimpl") :].replace("backend=Plain, options=Options", 'backend="a.b:C"')
    header = "from headstock import Capabilities, Offer, hookimpl\n\n\n"
    (path,) = (tmp_path / "site").glob("plain_*.py")
    path.write_text(header + manifest, encoding="utf-8")
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); " + START
    command = [sys.executable, "-c", code, "generate", "Hi", "--model", model, "--page-size", "8", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr


def test_a_real_process_streams_and_ends_well(plain, model):
    command = [sys.executable, "-c", START, "generate", "Hi", "--model", model, "--max-tokens", "4", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "Traceback" not in done.stderr


# Interrupted, and gone on with

RECORDS = [{"prompt": f"prompt {i}", "max_tokens": 3 + 7 * (i % 3)} for i in range(5)]
SLOW = BACKEND.replace("        batch.metadata = None", "        import time; time.sleep(0.1)")


def slow_process(model, tmp_path, *arguments, stderr=subprocess.PIPE):
    """Starts a run in a process of its own, where each step takes a tenth of a second."""
    (path,) = (tmp_path / "site").glob("plain_*.py")
    path.write_text(SLOW, encoding="utf-8")
    command = [sys.executable, "-c", START, "generate", *arguments, "--raw", "--model", model, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen([str(part) for part in command], text=True, cwd=tmp_path, **pipes)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_ctrl_c_saves_what_is_finished_and_a_run_goes_on_from_there(generate, plain, model, tmp_path):
    file, output, whole = jsonl(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    flags = ["--prompt-file", file, "--max-batch", 2, "--temperature", 0.8, "--seed", 3]
    assert generate(*flags, "--raw", "--output", whole)[0] == 0
    process = slow_process(model, tmp_path, *flags, "--output", output)
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[-1].startswith("headstock: interrupted, ")
    assert err.splitlines()[-1].endswith(" of 5 prompts answered; to go on, give the same command --resume")
    assert "Traceback" not in err
    kept = output.read_text(encoding="utf-8").splitlines()
    assert 2 <= len(kept) < 5
    assert kept == [line for line in whole.read_text(encoding="utf-8").splitlines() if line in kept]
    code, _, err = generate(*flags, "--raw", "--output", output, "--resume")
    assert code == 0
    assert f"{output} has {len(kept)} answers already, {5 - len(kept)} are to come" in err
    assert output.read_bytes() == whole.read_bytes()


def test_a_file_that_another_run_writes_is_refused_until_that_ends(generate, plain, model, tmp_path):
    """Of another process, also by another name of the file; and once it is killed, nothing is in the way."""
    file, output, link = jsonl(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    flags = ["--prompt-file", file, "--max-batch", 1]
    process = slow_process(model, tmp_path, *flags, "--output", output)
    try:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 1)
        link.symlink_to(output)
        for name in (output, link):
            for more in ([], ["--resume"]):
                told = f"cannot write {name}: another run is writing it"
                assert refused(generate(*flags, "--raw", "--output", name, *more), told)
        assert generate("Hi", "--raw", "--output", tmp_path / "other.jsonl", "--max-tokens", 1)[0] == 0
    finally:
        process.kill()
        process.communicate()
    assert generate(*flags, "--raw", "--output", output, "--resume")[0] == 0
    assert len(output.read_bytes().splitlines()) == len(RECORDS)
    assert {each.name for each in tmp_path.iterdir() if "lock" in each.name} == set()


def test_a_terminal_shows_how_far_a_run_is_and_how_fast(plain, model, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", *RECORDS)
    ours, theirs = pty.openpty()
    process = slow_process(model, tmp_path, "--prompt-file", file, "--max-batch", 2, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert len(out.splitlines()) == 5
    shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown)
    assert re.search(rb"generating .* 0/5 +\d+ tokens/s, 2 run, 3 wait", shown), shown
    assert re.search(rb"3/5 .*tokens/s, ", shown), shown


def test_a_killed_run_leaves_every_line_that_was_finished(generate, plain, model, tmp_path):
    file, output = jsonl(tmp_path / "in.jsonl", {"prompt": "long", "max_tokens": 50}, *RECORDS), tmp_path / "out.jsonl"
    process = slow_process(model, tmp_path, "--prompt-file", file, "--max-batch", 2, "--output", output)
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
    process.kill()
    process.communicate(timeout=60)
    kept = output.read_text(encoding="utf-8").splitlines()
    assert json.loads(kept[0])["index"] == 1, "the first prompt is the last to end"
    assert generate("--prompt-file", file, "--raw", "--output", output, "--resume")[0] == 0
    lines = output.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(6))
    assert set(kept) <= set(lines)


def test_a_second_ctrl_c_interrupts_at_once_and_without_a_word(plain, model, tmp_path):
    file, output = jsonl(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl"
    process = slow_process(model, tmp_path, "--prompt-file", file, "--max-batch", 2, "--output", output, "--quiet")
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
    assert all(json.loads(line)["text"] for line in output.read_bytes().splitlines())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_streamed_answer_with_a_line_break(plain, model, tmp_path, number, code):
    process = slow_process(model, tmp_path, "Hi", "--max-tokens", 60, "--temperature", 1)
    process.stdout.read(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out.endswith("\n")
    assert err.splitlines()[-1] == "headstock: interrupted, 0 of 1 prompts answered"
    assert "Traceback" not in err


def test_an_output_cut_anywhere_becomes_whole_again(generate, tmp_path):
    file, output = jsonl(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl"
    flags = ["--prompt-file", file, "--raw", "--quiet", "--output", output]
    assert generate(*flags, "--resume") == (0, "", ""), "where there is nothing yet, it starts"
    whole = output.read_bytes()
    second = whole.index(b"\n") + 1
    lines = whole.splitlines(keepends=True)
    cuts = [whole[:end] for end in (0, 1, second - 1, second, second + 20, len(whole) - 1, len(whole))]
    for left in [*cuts, b"".join(lines[3:] + lines[:2]), lines[4] + b'{"index": 7, "te', lines[2] + b"\xff\xfe"]:
        output.write_bytes(left)
        assert generate(*flags, "--resume") == (0, "", "")
        assert output.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_prompt_that_failed_is_tried_again(generate, tmp_path):
    file, output = jsonl(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl"
    flags = ["--prompt-file", file, "--raw", "--output", output]
    assert generate(*flags)[0] == 0
    whole = output.read_bytes()
    for failed in ([1, 4], range(5)):
        answers = [json.loads(line) for line in whole.splitlines()]
        for index in failed:
            answers[index] |= {"text": "", "finish_reason": "error", "error": "not finite"}
        jsonl(output, *answers)
        assert generate(*flags, "--resume")[0] == 0
        assert list(map(json.loads, output.read_bytes().splitlines())) == list(map(json.loads, whole.splitlines()))


def test_more_prompts_may_follow_and_nothing_is_run_twice(generate, tmp_path):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    flags = ["--prompt-file", file, "--raw", "--output", output, "--max-tokens", 4, "--resume"]
    jsonl(file, {"prompt": "one"}, {"prompt": "two"})
    assert generate(*flags)[0] == 0
    first = output.read_bytes()
    assert generate(*flags) == (0, "", f"{output} has 2 answers already, 0 are to come\n")
    jsonl(file, {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three\u2028four"})
    assert "output 4 tokens" in generate(*flags)[2]
    assert output.read_bytes().startswith(first)
    assert json.loads(output.read_bytes().splitlines()[2])["prompt"] == "three\u2028four"


@pytest.mark.parametrize(
    ("line", "flags", "told"),
    [
        ({"prompt": "other"}, [], "out.jsonl:1 answers another prompt than is given now"),
        ({"messages": [{"role": "user", "content": "one"}]}, [], "out.jsonl:1 answers another prompt"),
        (None, ["--max-tokens", 9], "out.jsonl:1 was made with other options; given: max_tokens 9, there 4"),
        (None, ["--temperature", 0.5], "given: temperature 0.5, there by default"),
        (None, ["--dtype", "bfloat16"], "given: dtype bfloat16, there by default"),
        (None, ["--max-context", 32], "given: max_context 32"),
    ],
)
def test_another_input_or_other_options_are_refused_and_the_output_is_left_alone(generate, tmp_path, line, flags, told):
    file, output = jsonl(tmp_path / "in.jsonl", {"prompt": "one"}), tmp_path / "out.jsonl"
    assert generate("--prompt-file", file, "--output", output, "--max-tokens", 4)[0] == 0
    before = output.read_bytes()
    if line:
        jsonl(file, line)
    assert refused(generate("--prompt-file", file, "--output", output, "--max-tokens", 4, *flags, "--resume"), told)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["a diary\n", '{"version": 1}\n', "[1]\n\n", "[" * 10**5 + "\n", '{"index": 9}\n', '{"index": "0"}\n']
)
def test_a_file_of_anything_else_is_not_gone_on_with(generate, tmp_path, content):
    file, output = jsonl(tmp_path / "in.jsonl", {"prompt": "one"}), tmp_path / "out.jsonl"
    output.write_text(content, encoding="utf-8")
    assert refused(generate("--prompt-file", file, "--raw", "--output", output, "--resume"), "out.jsonl:1")
    assert output.read_text(encoding="utf-8") == content
    assert refused(generate("--prompt-file", file, "--resume"), "--output FILE")


def test_other_models_raw_text_and_links(generate, model, tmp_path):
    file, output, link = jsonl(tmp_path / "in.jsonl", {"prompt": "one"}), tmp_path / "out.jsonl", tmp_path / "link"
    link.symlink_to(output)
    flags = ["--prompt-file", file, "--max-tokens", 4, "--output", link]
    assert generate(*flags, "--raw")[0] == 0
    assert refused(generate(*flags, "--resume"), "given: raw by default, there True")
    copy = shutil.copytree(model, tmp_path / "copy")
    assert refused(generate(*flags, "--raw", "--resume", "--model", copy), f"given: model {copy}, there {model}")
    assert generate(*flags, "--raw", "--resume")[0] == 0
    assert link.is_symlink()
    assert output.is_file()
