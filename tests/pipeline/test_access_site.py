"""A home's access file is remembered; the commands' exit codes and what they print; all on the in-memory twin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftloop.pipeline.cli_stream import access_app
from draftloop.pipeline.errors import AccessSurpriseError, ConfigError
from draftloop.pipeline.stream import access_site
from draftloop.pipeline.stream.access_memory import MemoryCluster
from draftloop.pipeline.stream.access_rules import Acl
from draftloop.pipeline.stream.access_secrets import open_secrets
from draftloop.pipeline.stream.access_site import Site, Source, find_source
from draftloop.pipeline.stream.access_spec import DEFAULT_FILE, TopicState, load_spec
from draftloop.pipeline.stream.audit import MemoryAudit
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity

OWN = """
targets = ["m"]

[[topics]]
name = "draftloop.audit"
partitions = 1
retention = "forever"

[[principals]]
name = "draftloop-auditor"
acls = [{ allow = ["READ"], topic = "draftloop.audit" }]
"""


class Stage:
    """A home on a twin cluster, opened as `open_site` opens it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cluster = MemoryCluster()
        self.audit = MemoryAudit()
        login = KafkaSecurity(username="admin", password_file=Path("/none"), ca_file=Path("/ca.pem"))
        self.admin = KafkaConfig(bootstrap=("127.0.0.1:9",), cluster_id="memory", security=login)

    @contextmanager
    def open(self, home: Path, file: Path | None, *, targets: tuple[str, ...] | None = None) -> Iterator[Site]:
        source, applied = find_source(home, file, targets)
        spec = load_spec(source.file, targets=source.targets)
        yield Site(home, spec, self.cluster, open_secrets(spec, home, self.admin), self.audit, source, applied)

    def apply(self, file: Path | None = None, targets: tuple[str, ...] | None = None) -> Site:
        with self.open(self.home, file, targets=targets) as site:
            site.apply()
        return site


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "home").mkdir()
    return Stage(tmp_path / "home")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return file


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the stage's home: (exit code, stdout, stderr)."""
    monkeypatch.setattr(access_site, "open_site", stage.open)

    def run(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(access_app, [words[0], "--home", str(stage.home), *words[1:]], env={"COLUMNS": "500"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    return run


# --- which access file ---


def test_without_access_the_file_applied_last_is_used(stage: Stage, own: Path) -> None:
    assert find_source(stage.home, None, None) == (Source(), Source())
    stage.apply(own)
    source, applied = find_source(stage.home, None, None)
    assert source.file == own
    assert applied == Source(str(own), None, applied.sha256)
    assert len(applied.sha256) == 64
    state = stage.cluster.state("draftloop.")
    assert stage.apply().spec == load_spec(own)
    assert stage.cluster.state("draftloop.") == state


def test_a_file_named_in_a_relative_way_is_found_from_anywhere(
    stage: Stage, own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(own.parent)
    stage.apply(Path(own.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_source(stage.home, None, None)[0].file == own


def test_only_apply_remembers_and_not_where_it_refused(stage: Stage, own: Path) -> None:
    with stage.open(stage.home, own) as site:
        site.plan()
    assert not (stage.home / "access.json").exists()
    stage.cluster.create_topic("draftloop.audit", TopicState(2, 1, {}))
    with stage.open(stage.home, own) as site, pytest.raises(ConfigError, match="can only grow"):
        site.apply()
    assert not (stage.home / "access.json").exists()


def test_a_remembered_file_that_is_gone_is_an_error_with_the_mend_and_draftloops_own_is_not_taken(
    stage: Stage, own: Path, tmp_path: Path
) -> None:
    stage.apply(own)
    moved = own.rename(tmp_path / "moved.toml")
    with pytest.raises(ConfigError, match=r"own\.toml, which was applied to .* last, is not there") as gone:
        find_source(stage.home, None, None)
    assert "--access FILE" in (gone.value.mend or "")
    assert find_source(stage.home, moved, None)[0].file == moved


def test_targets_are_remembered_where_they_were_passed(stage: Stage) -> None:
    stage.apply(None, targets=("tiny",))
    source, _ = find_source(stage.home, None, None)
    assert (source.access, source.targets) == (None, ("tiny",))
    assert stage.apply().spec.targets == ("tiny",)
    assert find_source(stage.home, None, ("other",))[0].targets == ("other",)


def test_what_is_remembered_is_written_once_and_a_damaged_note_is_told(stage: Stage, own: Path) -> None:
    stage.apply(own)
    note = stage.home / "access.json"
    before = note.stat().st_mtime_ns
    stage.apply()
    assert note.stat().st_mtime_ns == before
    note.write_text("{")
    with pytest.raises(ConfigError, match=r"access\.json, which says which access file was applied"):
        find_source(stage.home, own, None)


def test_the_plan_says_that_the_file_has_changed_since_it_was_applied(stage: Stage, own: Path) -> None:
    stage.apply(own)
    own.write_text(OWN.replace("partitions = 1", "partitions = 3"))
    with stage.open(stage.home, None) as site:
        assert site.plan().text().splitlines() == [
            "change topic draftloop.audit: partitions 1 -> 3",
            "the access file has changed since it was applied last",
        ]


# --- the commands ---


def test_plan_check_is_for_timers(stage: Stage, own: Path, run: Run) -> None:
    assert run("plan", "--access", str(own))[0] == 0
    assert run("plan", "--access", str(own), "--check")[0] == 1
    assert run("apply", "--access", str(own))[0] == 0
    assert run("plan", "--check") == (0, "nothing to do: the cluster is as the access file says\n", "")
    stage.cluster.create_acl(Acl("User:spy", "ALLOW", "READ", "topic", "draftloop.audit", "literal"))
    assert run("plan")[0] == 0
    assert run("plan", "--check", "--json")[0] == 1


def test_what_cannot_be_done_is_exit_code_2_of_plan_too(stage: Stage, own: Path, run: Run) -> None:
    stage.cluster.create_topic("draftloop.audit", TopicState(2, 1, {}))
    code, out, _ = run("plan", "--access", str(own))
    assert code == 2
    assert out.startswith("IMPOSSIBLE topic draftloop.audit has 2 partitions, the file says 1:")
    code, out, _ = run("plan", "--access", str(own), "--check", "--json")
    assert code == 2
    assert json.loads(out)["impossible"]
    with pytest.raises(ConfigError) as refused:
        run("apply", "--access", str(own))
    assert refused.value.exit_code == 2


def test_apply_tells_each_act_once_and_sums_up_on_stdout(stage: Stage, own: Path, run: Run) -> None:
    code, out, err = run("apply", "--access", str(own))
    assert (code, out) == (0, "4 changes made\n")
    assert err.splitlines() == [
        "create topic draftloop.audit",
        "create user draftloop-auditor",
        "write client file of draftloop-auditor",
        "add allow User:draftloop-auditor READ on topic draftloop.audit",
    ]
    assert run("apply") == (0, "nothing to do: the cluster is as the access file says\n", "")
    stage.cluster.create_topic("draftloop.old", TopicState(1, 1, {}))
    assert run("apply")[1] == (
        "all that the access file says is there; left to you:\nextra topic: draftloop.old (not deleted by draftloop)\n"
    )
    assert json.loads(run("apply", "--json")[1])["acts"] == []


def test_commands_in_messages_are_whole(stage: Stage, own: Path, run: Run) -> None:
    run("apply", "--access", str(own))
    (stage.home / "secrets" / "draftloop-auditor.password").unlink()
    code, out, err = run("apply")
    whole = f"`draftloop access apply --home {stage.home} --access {own} --rotate draftloop-auditor`"
    assert code == 2
    assert whole in out
    assert whole in err
    assert err.startswith("ConfigError: 1 user without a client file")
    code, out, _ = run("apply", "--json")
    assert code == 2
    assert json.loads(out)["without_secret"] == ["draftloop-auditor"]
    assert run("apply", "--rotate", "draftloop-auditor")[:2] == (0, "1 change made\n")


def test_a_homes_verify_looks_beyond_the_tries(stage: Stage, own: Path) -> None:
    with stage.open(stage.home, own) as site:
        site.apply()
        site.verify(connect=stage.cluster.connect).check()
        stage.cluster.create_acl(Acl("User:spy", "ALLOW", "READ", "topic", "draftloop.audit", "literal"))
        with pytest.raises(AccessSurpriseError, match="allow User:spy READ on topic") as surprise:
            site.verify(connect=stage.cluster.connect).check()
    whole = f"`draftloop access apply --home {stage.home} --access {own} --prune` removes extra ACLs and users"
    assert surprise.value.mend == whole


def test_the_example_is_draftloops_own_file_and_works(tmp_path: Path) -> None:
    done = CliRunner().invoke(access_app, ["example"])
    assert (done.exit_code, done.stdout) == (0, DEFAULT_FILE.read_text())
    file = tmp_path / "access.toml"
    file.write_text(done.stdout)
    assert load_spec(file) == load_spec(None)
    assert json.loads(CliRunner().invoke(access_app, ["example", "--json"]).stdout) == {
        "toml": DEFAULT_FILE.read_text()
    }
