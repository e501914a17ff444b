"""The configuration: where it comes from, what it must say, and how it says what is wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hs_assets.config import load_project, parse_settings, read_preset
from hs_assets.errors import ConfigError

MINIMAL = '[model]\npath = "models/m"\n[[prompts.sources]]\npath = "data/chats.v2.jsonl"\n'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HS_ASSETS_HOME", "HS_ASSETS_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_file_it_is_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = load_project()
    assert (project.origin, project.home.root) == ("preset:demo", tmp_path / ".hs_assets")
    assert project.settings.model.path == tmp_path / ".hs_assets" / "models" / "demo"
    (source,) = project.settings.prompts.sources
    assert (source.name, source.path.name, source.path.exists()) == ("demo", "demo_conversations.jsonl", True)


def test_arguments_win_over_the_environment_and_that_over_the_homes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for name in ("argument", "environment", "home"):
        files[name] = tmp_path / name / "hs_assets.toml"
        files[name].parent.mkdir()
        files[name].write_text(MINIMAL)
    assert load_project(tmp_path / "home").origin == str(files["home"])
    monkeypatch.setenv("HS_ASSETS_HOME", str(tmp_path / "home"))
    assert load_project().origin == str(files["home"])
    monkeypatch.setenv("HS_ASSETS_CONFIG", str(files["environment"]))
    assert load_project().origin == str(files["environment"])
    assert load_project(None, files["argument"]).origin == str(files["argument"])


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "c.toml"
    config.parent.mkdir()
    config.write_text(MINIMAL + '[store]\npath = "/mnt/store.zarr"\n[server]\nspool = "../spool"\n')
    project = load_project(tmp_path / "home", config)
    assert project.spool_path == tmp_path / "etc" / "../spool"
    assert project.settings.model.path == tmp_path / "etc" / "models" / "m"
    assert project.settings.prompts.sources[0].path == tmp_path / "etc" / "data" / "chats.v2.jsonl"
    assert project.settings.prompts.sources[0].name == "chats"
    assert project.store_path == Path("/mnt/store.zarr")
    config.write_text(MINIMAL)
    assert load_project(tmp_path / "home", config).spool_path.parent == Path("/dev/shm")


def test_every_path_is_relative_to_the_file_and_knows_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    config = tmp_path / "etc" / "c.toml"
    config.parent.mkdir()
    server = '[server]\nspool_root = "spools"\npython = "env/bin/python"\n[store]\npath = "~/store.zarr"\n'
    config.write_text(MINIMAL + server)
    project = load_project(tmp_path / "home", config)
    assert project.spool_path.parent == tmp_path / "etc" / "spools"
    assert project.settings.server.python == str(tmp_path / "etc" / "env" / "bin" / "python")
    assert project.store_path == tmp_path / "user" / "store.zarr"
    config.write_text(MINIMAL + '[server]\npython = "python3"\n')
    assert load_project(tmp_path / "home", config).settings.server.python == "python3"


def test_a_file_is_utf8_whoever_wrote_it(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_project(tmp_path, config).settings.prompts.sources[0].name == "chats"
    config.write_bytes(b"# caf\xe9\n" + MINIMAL.encode())
    with pytest.raises(ConfigError, match=r"cannot be read(.|\n)*c\.toml(.|\n)*utf-8"):
        load_project(tmp_path, config)


def test_two_homes_have_two_spools(tmp_path: Path) -> None:
    one, other = load_project(tmp_path / "a"), load_project(tmp_path / "b")
    assert one.spool_path != other.spool_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = [", "the configuration is not TOML"),
        (
            MINIMAL + "[server]\nchunk_tokens = 0\n",
            r"server\.chunk_tokens(.|\n)*expected: more than 0\n  got: 0",
        ),
        (MINIMAL + "[server]\nchunk_token = 5\n", r"no such setting(.|\n)*server\.chunk_token\n(.|\n)*remedy: chunk_tokens may"),
        (MINIMAL + "[prompts]\nmax_tokens = 1\n", "prompts"),
        ('[model]\npath = "m"\n', r"a setting is missing(.|\n)*where: c.toml: prompts\n  expected: a value for prompts"),
        ("[[prompts.sources]]\npath = 'x'\n[model]\n", r"where: c.toml: model\.path\n"),
        (MINIMAL + 'fromat = "text"\n', r"prompts\.sources\.0\.fromat\n  expected: one of format, name, path\n(.|\n)*format may"),
        (
            'layers = "all"\n' + MINIMAL + "[rules]\nprefix_share = 1.5\n",
            r"rules\.prefix_share\n  expected: at most 1\.?0?\n  got: 1.5",
        ),
        ("layers = [2.5]\n" + MINIMAL, r"where: c.toml: layers\n  expected: a list of residual ids, such as (.|\n)*\"eagle3\""),
        (MINIMAL + '[server]\nwriters = "four"\n', r"server\.writers\n  expected: a whole number\n  got: 'four'"),
        (MINIMAL + "[server]\nenv = { X = 1 }\n", r"server\.env\.X\n  expected: a text\n  got: 1"),
        (MINIMAL + "[server]\nwriters = true\n", r"c.toml: server\.writers\n  expected: a whole number\n  got: True\n  remedy:"),
        (MINIMAL + '[server]\nwriters = "4"\n', r"server\.writers\n  expected: a whole number\n  got: '4'"),
        (MINIMAL + "[server]\nwriters = 4.0\n", r"server\.writers\n  expected: a whole number\n  got: 4.0"),
        (MINIMAL + "[server]\nidle_stop_seconds = true\n", r"idle_stop_seconds\n  expected: a number\n  got: True"),
        (MINIMAL + "[responses]\nenabled = 1\n", r"responses\.enabled\n  expected: true or false\n  got: 1"),
        ("layers = [true, 3]\n" + MINIMAL, r"where: c.toml: layers\n  expected: a list of residual ids"),
        (MINIMAL + "[store]\npath = 2026-01-01\n", r"store\.path\n  expected: a text\n  got: .*2026-01-01"),
        (MINIMAL + "[server]\nenv = 2026-01-01\n", r"server\.env"),
        (MINIMAL + "[server]\nargs = 5\n", r"server\.args\n  expected: a list\n  got: 5"),
        (MINIMAL + '[server]\nurl = "host:3000"\n', r"server\.url\n  expected: http://HOST:PORT\n  got: 'host:3000'"),
        ("server = 3\n" + MINIMAL, r"c.toml: server\n  expected: a section\n  got: 3"),
        (MINIMAL + 'format = "sharegpt"\n', r"prompts\.sources\.0\.format(.|\n)*'messages'"),
        (MINIMAL.replace("[model]", "[model]\nrevision = 3"), r"model\.revision"),
        (MINIMAL + "[responses]\ntemperature = -0.1\n", r"responses\.temperature"),
        (MINIMAL + "[responses]\ntop_p = 0\n", r"responses\.top_p"),
        (MINIMAL + '[responses]\ncut = "cut"\n', r"responses\.cut(.|\n)*'drop' or 'keep'"),
        (MINIMAL + '[server]\nurl = "http://127.0.0.1:abc"\n', r"server\.url\n  expected: http://HOST:PORT"),
        (MINIMAL + '[server]\nurl = "http://."\n', r"server\.url\n  expected: http://HOST:PORT"),
        (MINIMAL + '[server]\nurl = "http://127.0.0.1:1?x=1"\n', r"server\.url\n  expected: http://HOST:PORT"),
        (MINIMAL + "[rules]\nlogprob_tolerance = inf\n", r"rules\.logprob_tolerance\n(.|\n)*finite(.|\n)*got: inf"),
        (MINIMAL + "[server]\nrequest_timeout_seconds = inf\n", r"server\.request_timeout_seconds\n(.|\n)*got: inf"),
        (MINIMAL + "[store]\nchunk_tokens = 100\n", r"c.toml: store\n  expected: shard_tokens a multiple of chunk_tokens"),
        (MINIMAL + '[store]\npath = "a\\u0000b"\n', r"store\.path\n  expected: a path without NUL"),
        (MINIMAL + '[store]\npath = "~no-such-user/x"\n', r"store\.path\n  expected: a path, or ~ of a user that"),
        (MINIMAL + '[server]\nargs = ["--x\\u0000"]\n', r"server\.args\.0\n"),
        (MINIMAL + '[server]\nenv = { "A B" = "1" }\n', r"server\.env\.A B"),
    ],
)
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(text, "c.toml")


@pytest.mark.parametrize(
    "sources",
    [
        '[[prompts.sources]]\npath = "a/x.jsonl"\n[[prompts.sources]]\npath = "b/x.jsonl"\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = "a/b"\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = ".."\n',
        f'[[prompts.sources]]\npath = "x.jsonl"\nname = "{"n" * 140}"\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = "a,b"\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = "a\\nb"\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = "a\\n"\n',
        '[[prompts.sources]]\npath = ".jsonl/"\nname = " "\n',
        '[[prompts.sources]]\npath = "x.jsonl"\nname = "größe"\n',
    ],
    ids=["the same name twice", "a slash", "dots", "too long", "a comma", "a line break", "one at the end", "a blank", "letters"],
)
def test_names_of_sources_must_make_partition_keys(tmp_path: Path, sources: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[model]\npath = "m"\n' + sources)
    with pytest.raises(ConfigError, match=r"remedy: give (one of them|it) a name"):
        load_project(tmp_path, config)


def test_a_file_name_is_made_safe(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[model]\npath = "m"\n[[prompts.sources]]\npath = "chats, of\\nmay größe.jsonl"\n')
    assert load_project(tmp_path, config).settings.prompts.sources[0].name == "chats-of-may-gr-e"


def test_presets_are_valid_and_unknown_ones_are_named(tmp_path: Path) -> None:
    for name in ("demo", "kimi-k2.5"):
        parse_settings(read_preset(name), name)
    with pytest.raises(ConfigError, match=r"preset:demo or preset:kimi-k2\.5"):
        load_project(tmp_path, "preset:nope")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_project(tmp_path, tmp_path / "absent.toml")


def test_whole_numbers_are_numbers_too() -> None:
    assert parse_settings(MINIMAL + "[server]\nidle_stop_seconds = 5\n", "c.toml").server.idle_stop_seconds == 5.0


@pytest.mark.parametrize("name", ["spool", "spool_root"])
@pytest.mark.parametrize("folder", ["a#b", "what?", "two\\nlines"])
def test_a_spool_where_ranks_would_not_meet_is_refused_by_name(tmp_path: Path, name: str, folder: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'{MINIMAL}[server]\n{name} = "/dev/shm/{folder}/x"\n')
    with pytest.raises(ConfigError, match=rf"where: server\.{name}\n  expected: a path without(.|\n)*got: (.|\n)*remedy: choose"):
        load_project(tmp_path, config)


def test_torch_finds_the_file_of_every_spool_that_is_allowed_and_not_of_one_that_is_refused(
    tmp_path: Path, engine_python: Path
) -> None:
    code = (
        "import sys, pathlib, torch.distributed as d\n"
        "for text in sys.argv[1:]:\n"
        "    path = pathlib.Path(text) / 'rendezvous'\n"
        "    path.parent.mkdir()\n"
        "    try: store, *_ = next(d.rendezvous(f'file://{path}', 0, 1)); store.set('k', 'v'); print(path.exists())\n"
        "    except Exception: print(False)\n"
    )
    allowed, refused = ["100%", "a b", "größe", "%23", "semi;colon", "[x]", "a&b=c"], ["a#b"]
    for name in allowed:
        config = tmp_path / "c.toml"
        config.write_text(f'{MINIMAL}[server]\nspool = "{tmp_path}/{name}"\n')
        assert load_project(tmp_path, config).spool_path == tmp_path / name
    command = [engine_python, "-c", code, *(tmp_path / name for name in [*allowed, *refused])]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["True"] * len(allowed) + ["False"] * len(refused)
