"""The commands over a real Kafka, as an operator types them; and what must never be seen anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline.data.curate import pending_window
from draftloop.pipeline.loop import GROUP
from draftloop.pipeline.records import CapturedRequest, Consent, Sampling, encode, pack_ids
from draftloop.pipeline.stream.audit import read_audit
from draftloop.pipeline.stream.kafka_config import read_client
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry

RAW, DLQ = "draftloop.raw.tiny", "draftloop.dlq.tiny"
CANARY = "canary-5f1e"  # a conversation nobody may see outside the raw topic and its snapshot
POISON = b"\xc1 not a record"
CANARY_IDS = (61, 67, 71, 73, 79, 83, 89, 97)


@dataclass
class Place:
    """A broker with its users, a work folder, and everything any command has said."""

    home: Path
    work: Path
    target: Path
    libs: Path
    said: list[str]

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """One command with --json; its exit code is checked, its answer parsed."""
        command = [sys.executable, "-W", "ignore", "-m", "draftloop.pipeline.cli", *arguments, "--json"]
        environ = {**os.environ, "DRAFTLOOP_KAFKA_LIBS": str(self.libs)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, cwd=self.home.parent)
        self.said += [" ".join(command), done.stdout, done.stderr]
        assert done.returncode == code, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def loop(self, command: str, *more: str, user: str = "draftloop-curator", code: int = 0) -> dict[str, Any]:
        """A command of the loop that reads the log as `user`."""
        settings = [f"work='{self.work}'", f"target.path='{self.target}'", "target.dtype='float32'", *more]
        return self.run(command, *settings, "--config", str(self.client(user)), code=code)

    def client(self, user: str) -> Path:
        return self.home / "clients" / f"{user}.toml"

    def log(self, user: str) -> KafkaLog:
        return KafkaLog(read_client(self.client(user)))


@pytest.fixture(scope="module")
def place(tiny_target: Any, kafka_libs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("commands")
    target = root / "tiny"
    tiny_target.model.save_pretrained(target)
    tiny_target.tokenizer.save_pretrained(target)
    access = root / "access.toml"
    from draftloop.pipeline.stream.access_spec import DEFAULT_FILE

    access.write_text(DEFAULT_FILE.read_text().replace('targets = ["smollm2"]', 'targets = ["tiny"]'))
    made = Place(root / "home", root / "work", target, kafka_libs, [])
    assert made.run("broker", "up", "--home", str(made.home))["running"]
    made.run("access", "apply", "--home", str(made.home), "--access", str(access))
    yield made
    assert made.run("broker", "down", "--home", str(made.home)) == {"stopped": True}
    shutil.rmtree(root, ignore_errors=True)


def record(number: int, target: str, *, ids: tuple[int, ...] = (5, 6, 7, 8), conversation: str = "") -> LogEntry:
    conversation = conversation or f"conversation-{number}"
    made = CapturedRequest(
        record_id=f"record-{number}",
        time_ms=1_700_000_000_000 + number,
        conversation_id=conversation,
        tenant="acme",
        subject="s",
        consent=Consent(purpose="train", policy_version="1", basis="tenant-policy"),
        target=target,
        drafter_version=None,
        prompt_ids=pack_ids([3 + number % 100, 4]),
        output_ids=pack_ids(ids),
        finish_reason="stop",
        sampling=Sampling(),
    )
    return LogEntry(conversation.encode(), encode(made))


@pytest.fixture(scope="module")
def curated(place: Place, tiny_target: Any) -> dict[str, Any]:
    """Traffic written as the hook, with poison in it, and the window curated as the curator."""
    digest = tiny_target.fingerprint.digest
    hook = place.log("draftloop-hook")
    hook.append(RAW, [record(number, digest) for number in range(60)])
    hook.append(
        RAW, [record(60, digest, ids=CANARY_IDS, conversation=CANARY), LogEntry(b"poison", b"\xc1 not a record")]
    )
    hook.append(RAW, [record(7, digest)])  # a redelivery
    hook.close()
    return place.loop("curate")


def test_the_window_becomes_a_snapshot_and_every_entry_has_a_fate(curated: dict[str, Any]) -> None:
    counts = curated["curate"]["counts"]
    assert counts["captured"] == 63
    assert counts["rejected"] == {"duplicate_record": 1, "undecodable": 1}
    assert counts["kept"] == 61


def test_the_same_window_gives_the_identical_snapshot_in_another_work_folder(
    place: Place, curated: dict[str, Any]
) -> None:
    again = place.loop("curate", f"work='{place.work}-again'")
    assert again["curate"]["snapshot"] == curated["curate"]["snapshot"]


def test_reading_a_window_is_on_record_with_its_offsets_before_and_after(place: Place, curated: dict[str, Any]) -> None:
    log = place.log("admin")
    read = [line for line in read_audit(log) if line.act == "window.read"]
    log.close()
    assert [(line.outcome, line.by, line.subject) for line in read[:2]] == [
        ("begun", "draftloop-curator", RAW),
        ("done", "draftloop-curator", RAW),
    ]
    assert read[0].details["job"] == curated["job"]
    spans = [span.split("..") for key, span in read[0].details.items() if key.startswith("partition")]
    assert sum(int(stop) - int(start) for start, stop in spans) == 63


def test_poison_is_on_the_dlq_with_its_reason_and_place(place: Place, curated: dict[str, Any]) -> None:
    import msgspec

    log = place.log("draftloop-curator")
    entries = list(log.read(DLQ, 0, 0, log.end_offsets(DLQ)[0]))
    log.close()
    letters = {entry.key: msgspec.msgpack.decode(entry.value) for entry in entries}  # a job run twice writes it twice
    assert [(letter["reason"], letter["value"]) for letter in letters.values()] == [
        ("undecodable", b"\xc1 not a record")
    ]


def test_what_was_not_committed_is_planned_again(place: Place, curated: dict[str, Any]) -> None:
    log = place.log("draftloop-curator")
    assert pending_window(log, RAW, GROUP).num_entries == 63  # the job stopped after curate: nothing is used up
    log.close()


def test_the_hooks_user_cannot_run_the_loop(place: Place, curated: dict[str, Any]) -> None:
    work = f"work='{place.work}-hook'"
    answer = place.loop("curate", work, user="draftloop-hook", code=1)
    assert answer["error"]["class"] == "AccessDeniedError"
    assert "draftloop-hook" in answer["error"]["message"]


def test_a_promotion_is_on_record_even_where_it_fails(place: Place, curated: dict[str, Any]) -> None:
    settings = [f"work='{place.work}'", "--config", str(place.client("draftloop-agent"))]
    place.run("promote", "99", *settings, "--by", "ana", "--reason", "a try", code=1)
    log = place.log("draftloop-auditor")
    found = [(x.act, x.outcome, x.by, x.subject) for x in read_audit(log) if x.act == "champion.promote"]
    log.close()
    assert found == [
        ("champion.promote", "begun", "ana", "candidate 99"),
        ("champion.promote", "failed", "ana", "candidate 99"),
    ]


def test_doctor_tells_a_wrong_password_from_a_missing_broker(place: Place) -> None:
    wrong = place.home.parent / "wrong.toml"
    secret = place.home.parent / "wrong.password"
    secret.write_text("hunter2-" + CANARY)
    secret.chmod(0o600)
    text = place.client("draftloop-curator").read_text()
    kept = [line for line in text.splitlines() if not line.startswith("password_file")]
    wrong.write_text("\n".join([*kept, f'password_file = "{secret}"']))
    settings = [f"work='{place.work}-doctor'", f"target.path='{place.target}'"]
    found = place.run("doctor", *settings, "--config", str(wrong), code=1)
    checks = {check["check"]: check for check in found["checks"]}
    assert not checks["broker"]["ok"]
    assert "password" in checks["broker"]["detail"] + checks["broker"]["mend"]
    assert "hunter2" not in json.dumps(found)
    gone = wrong.read_text().replace(read_client(wrong).bootstrap[0], "127.0.0.1:1")
    wrong.write_text(gone)
    missing = place.run("doctor", *settings, "--config", str(wrong), code=1)
    checks = {check["check"]: check for check in missing["checks"]}
    assert "127.0.0.1:1" in checks["broker"]["detail"]


def test_the_resolved_config_names_where_secrets_are_and_holds_none(place: Place) -> None:
    resolved = place.loop("config")
    security = resolved["log"]["kafka"]["security"]
    assert security["password_file"] == str(place.home / "secrets" / "draftloop-curator.password")


def test_a_password_in_the_wrong_place_is_refused_without_being_repeated(place: Place) -> None:
    answer = place.loop("config", 'log.kafka.security.password="hunter2"', code=2)
    assert answer["error"]["class"] == "ConfigError"
    place.loop("config", 'log.kafka.password="hunter2"', code=2)


def test_prompts_and_passwords_appear_nowhere_but_where_they_belong(place: Place, curated: dict[str, Any]) -> None:
    """Runs last: whatever the commands above said or wrote is looked through."""
    place.loop("status")
    place.loop("run-once", "train.epochs=1", "gate.min_conversations=500", code=3)
    passwords = [path.read_text().strip() for path in (place.home / "secrets").glob("*.password")]
    assert len(passwords) == 7
    hidden = [word.encode() for word in passwords] + [b"hunter2-" + CANARY.encode()]
    content = [CANARY.encode(), pack_ids(CANARY_IDS)]
    for text in place.said:
        for word in (*hidden, CANARY.encode()):
            assert word not in text.encode()
    for path in place.home.parent.rglob("*"):
        inside = path.relative_to(place.home.parent)
        if not path.is_file() or path.suffix == ".password":
            continue
        body = path.read_bytes()
        for word in hidden:
            assert word not in body, f"a password is in {inside}"
        if "snapshots" in inside.parts or ("data" in inside.parts and any(p.startswith(RAW) for p in inside.parts)):
            continue  # the raw topic and what was curated from it
        for word in content:
            assert word not in body, f"a prompt is in {inside}"
    log = place.log("admin")  # the broker's files are compressed: what is in other topics shows only when read
    for topic in set(log.topics()) - {RAW}:
        starts = log.start_offsets(topic)
        for partition, end in log.end_offsets(topic).items():
            for entry in log.read(topic, partition, starts[partition], end):
                for word in (*hidden, *content):
                    assert word not in entry.key + entry.value, f"a secret or a prompt is in {topic}"
    log.close()
