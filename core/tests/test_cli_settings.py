"""The configuration file under the flags: found, merged, and never silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstock.cli.doctor import doctor
from headstock.cli.options import Choices, Limits, flag_name
from headstock.cli.settings import Settings, find_file, read_file
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder as the current one, its parents free of configuration."""
    folder = tmp_path / "project" / "deep" / "down"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    if find_file(folder) is not None:
        pytest.skip("a configuration file lies above the folder for temporary files")
    return folder


def test_defaults_without_flags_or_file(here):
    settings = Settings.load(None, {})
    assert (settings.choices, settings.limits, settings.sampling) == (Choices(), Limits(), SamplingParams())
    assert (settings.file, settings.asked()) == (None, [])


def test_flags_win_over_the_file_and_the_origin_is_told(here):
    file = here.parents[1] / "headstock.toml"
    file.write_text('page-size = 16\nattention-backend = "torch"\ntemperature = 1\nmax-batch = 4\n', encoding="utf-8")
    settings = Settings.load(None, {"page_size": 64, "seed": 7})
    assert settings.file == file
    assert (settings.choices.page_size, settings.choices.attention_backend) == (64, "torch")
    assert (settings.sampling.temperature, settings.sampling.seed, settings.limits.max_batch) == (1.0, 7, 4)
    assert sorted(settings.asked()) == ["--page-size 64", f"{file}: attention-backend torch"]
    assert settings.choices.policy().backends == {"all": "torch"}


def test_each_flag_has_its_scope():
    named = {"attention_backend": "A_b", "prefill_attention_backend": "c", "decode_attention_backend": "d"}
    policy = Choices(**named, kv_layout="hnd", expand_from=600).policy()
    assert policy.backends == {"all": "a-b", "extend": "c", "decode": "d"}
    assert policy.kv_layouts == {"all": "hnd"}
    assert policy.expand_from == 600


def test_the_table_in_pyproject(here):
    (here / "pyproject.toml").write_text('[project]\nname = "x"\n', encoding="utf-8")
    upper = here.parent / "pyproject.toml"
    upper.write_text('[tool.headstock]\ndtype = "float32"\nstop = ["\\n"]\n', encoding="utf-8")
    settings = Settings.load(None, {})
    assert (settings.file, settings.choices.dtype, settings.sampling.stop) == (upper, "float32", ("\n",))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("tool = 5", "tool is no table; given: 5"),
        ("[tool]\nheadstock = 5", "headstock is no table; given: 5"),
        ('[tool]\nheadstock = "page-size"', "headstock is no table"),
        ("[[tool.headstock]]\npage-size = 4", "headstock is no table"),
    ],
)
def test_a_pyproject_of_another_shape_is_named(here, content, told):
    (here / "pyproject.toml").write_text(content, encoding="utf-8")
    with pytest.raises(HeadstockError, match=r"pyproject\.toml: ") as refusal:
        Settings.load(None, {})
    assert told in str(refusal.value)
    assert "[tool.headstock]" in str(refusal.value)


def test_the_byte_order_mark_of_some_editors_is_no_part_of_a_file(here):
    (here / "headstock.toml").write_bytes(b"\xef\xbb\xbfpage-size = 4\r\n")
    assert Settings.load(None, {}).choices.page_size == 4


def test_a_working_folder_that_is_gone_is_told(here):
    here.rmdir()
    for command in (lambda: Settings.load(None, {}), doctor):
        with pytest.raises(HeadstockError, match="working folder is gone"):
            command()
    here.mkdir()


def test_the_nearest_file_counts_and_a_named_one_before_it(here):
    (here.parent / "headstock.toml").write_text("page-size = 1", encoding="utf-8")
    (here / "headstock.toml").write_text("page-size = 2", encoding="utf-8")
    other = here / "other.toml"
    other.write_text("page-size = 3", encoding="utf-8")
    assert Settings.load(None, {}).choices.page_size == 2
    assert Settings.load(other, {}).choices.page_size == 3


def test_two_files_in_one_folder_are_refused(here):
    (here / "headstock.toml").write_text("", encoding="utf-8")
    (here / "pyproject.toml").write_text("[tool.headstock]\n", encoding="utf-8")
    with pytest.raises(HeadstockError, match="two configurations"):
        Settings.load(None, {})


def test_paths_are_taken_from_where_the_file_lies(here):
    file = here.parent / "headstock.toml"
    file.write_text('model = "models/small"\ndecision = "/abs/decision.json"', encoding="utf-8")
    choices = Settings.load(None, {}).choices
    assert (choices.model, choices.decision) == (file.parent / "models/small", Path("/abs/decision.json"))


def test_options_of_backends_merge_key_by_key(here):
    (here / "headstock.toml").write_text(
        "[backend-option.torch_native]\nsplits = 4\nupcast = true\n[backend-option.other]\nx = 1\n", encoding="utf-8"
    )
    flags = {"backend_option": ["Torch_Native.splits=8", "third.path=a=b.c"]}
    assert Settings.load(None, flags).limits.backend_option == {
        "torch-native": {"splits": "8", "upcast": True}, "other": {"x": 1}, "third": {"path": "a=b.c"},
    }  # fmt: skip


def test_every_option_can_be_written_to_the_file(here):
    values = {
        "model": '"m"', "device": '"cpu"', "dtype": '"float16"', "kv-dtype": '"float8_e4m3fn"', "max-context": "9",
        "attention-backend": '"a"', "prefill-attention-backend": '"b"', "decode-attention-backend": '"c"',
        "page-size": "4", "kv-layout": '"hnd"', "graph": '"on"', "cascade": '"on"', "decision": '"d"', "max-batch": "2",
        "expand-from": "600", "profile": "false", "profile-file": '"p"',
        "kv-tokens": "99", "mixed": '"split"', "graph-sizes": "[3]",
        "temperature": "0.5", "top-k": "5", "top-p": "0.5", "min-p": "0.5", "seed": "1", "max-tokens": "3",
        "stop": '["x"]', "stop-token-ids": "[1]", "ignore-eos": "true", "backend-option": "{a = {b = 1}}",
    }  # fmt: skip
    fields = {name for record in (Choices, Limits, SamplingParams) for name in record.model_fields}
    assert {f"--{key}" for key in values} == {flag_name(name) for name in fields}
    file = here / "headstock.toml"
    file.write_text("\n".join(f"{key} = {value}" for key, value in values.items()), encoding="utf-8")
    settings = Settings.load(None, {})
    for record in (settings.choices, settings.limits, settings.sampling):
        default = type(record)()
        assert [name for name, value in record if value == getattr(default, name)] == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("page-sise = 16", ["page-sise", "page-size, perhaps"]),
        ("page_size = 16", ["page_size", "page-size, perhaps"]),
        ("frobnicate = 1", ["frobnicate", "would work: model, device"]),
        ("graph-sizes = [0]", [": graph-sizes: 0: input should be greater than or equal to 1, given 0"]),
        ("page-size = 0", [": page-size", "greater than or equal to 1", "given 0"]),
        ('page-size = "many"', [": page-size", "given 'many'"]),
        ("temperature = -1", [": temperature", "given: -1"]),
        ("temperature = nan", [": temperature", "given: nan"]),
        ("stop = [1]", [": stop"]),
        ('page-size = "16"', [": page-size", "integer", "given '16'"]),
        ("page-size = 16.0", [": page-size", "integer", "given 16.0"]),
        ("page-size = true", [": page-size", "integer", "given True"]),
        ("max-batch = true", [": max-batch", "integer"]),
        ("device = 5", [": device", "string"]),
        ("model = 5", [": model", "given 5"]),
        ('model = ""', [": model", "given ''"]),
        ("x = " + "[" * 100_000 + "]" * 100_000, ["nested too deeply"]),
        ("backend-option = 3", ["backend-option.NAME"]),
        ("[backend-option]\na = 3", ["backend-option.NAME"]),
        ("page-size = ", ["is not TOML"]),
    ],
)
def test_a_bad_file_is_named_with_the_key(here, content, told):
    (here / "headstock.toml").write_text(content, encoding="utf-8")
    with pytest.raises(HeadstockError) as refusal:
        Settings.load(None, {})
    message = str(refusal.value)
    assert "headstock.toml" in message
    assert "\n" not in message.replace(content, "")
    for words in told:
        assert words in message


@pytest.mark.parametrize("option", ["splits=4", "torch.=4", ".splits=4", "torch.splits"])
def test_a_bad_backend_option_is_refused(here, option):
    with pytest.raises(HeadstockError, match=r"NAME\.KEY=VALUE"):
        Settings.load(None, {"backend_option": [option]})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(HeadstockError, match=r"none\.toml"):
        read_file(tmp_path / "none.toml")
