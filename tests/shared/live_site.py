"""A tiny target with signed drafters in an agent's folder, and one real vLLM server over them, for tests."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tiny_target import make_target, publish_chain_drafter

from draftloop.pipeline import artifact
from draftloop.pipeline.data.snapshot import Row
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.judge.config import GateConfig
from draftloop.pipeline.judge.gate import decide
from draftloop.pipeline.judge.replay import replay
from draftloop.pipeline.judge.verdict import load_or_make_key, public_key_path, sign
from draftloop.pipeline.records import CapturedRequest, decode
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.pipeline.stream.sqlite_log import SqliteLog
from draftloop.pipeline.vllm_config import VllmConfig
from draftloop.pipeline.vllm_server import MODEL_NAME, ServingFiles, VllmServer, request_json, write_serving
from draftloop.serving_hooks.vllm.settings import CaptureSettings, IdentitySettings, SwapSettings
from draftloop.trainers.checkpoint import open_drafter
from draftloop.trainers.target import Target

TENANT = "acme"  # has consented
API_KEY = "sk-of-globex"  # stands for tenant globex, who has consented too
API_TENANT = "globex"
TOPIC = "draftloop.raw.tiny"
GATE = GateConfig(min_conversations=5, min_tokens=100)
NUM_ROWS, ROW_TOKENS = 16, 40


@torch.no_grad()
def greedy_rows(target: Target, count: int = NUM_ROWS, tokens: int = ROW_TOKENS) -> list[Row]:
    """Random prompts and what the target itself answers, token by token."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for index in range(count):
        prompt = torch.randint(20, 49000, (6 + index,), generator=generator).tolist()
        output: list[int] = []
        while len(output) < tokens and (not output or output[-1] not in target.eos_ids):
            logits = target.model(torch.tensor([[*prompt, *output]]), logits_to_keep=1).logits
            output.append(int(logits[0, -1].argmax()))
        rows.append(Row(f"r{index}", f"c{index}", prompt, output, {}, 0.0, []))
    return rows


@dataclass
class TinySite:
    """The target, and AGENT with drafters/<version> and verdicts/<version>.json, as the agent leaves them."""

    target: Target
    rows: list[Row]
    folder: Path
    key: Ed25519PrivateKey

    @property
    def target_folder(self) -> Path:
        return self.folder / "target"

    @property
    def agent(self) -> Path:
        return self.folder / "agent"

    @property
    def staging(self) -> Path:
        return self.agent / "drafters"

    @property
    def live(self) -> Path:
        return self.agent / "live"

    @property
    def public_key(self) -> Path:
        return public_key_path(self.folder / "gate.key")

    @property
    def fingerprint(self) -> Fingerprint:
        return self.target.fingerprint

    def place(self, version: str) -> Path:
        """Where the drafter of a version lies."""
        return self.staging / version

    def verdict_file(self, version: str) -> Path:
        return self.agent / "verdicts" / f"{version}.json"

    def digest(self, version: str) -> str:
        """Of the drafter's folder."""
        return (self.place(version) / artifact.MARKER).read_text().strip()

    def tensors(self, version: str) -> str:
        """Digest of the drafter's tensors, as its manifest names it."""
        return str(json.loads((self.place(version) / artifact.MANIFEST).read_bytes())["tensor_digest"])

    def publish(self, version: str, *, knows: float, seed: int = 1, signed: bool = True) -> Path:
        """A drafter that knows a share of the chain: staged, and with a signed verdict against boot."""
        publish_chain_drafter(self.place(version), self.target, knows=knows, seed=seed)
        if signed:
            artifact.write_json(self.verdict_file(version), self.sign(version))
        return self.place(version)

    def sign(self, version: str, key: Ed25519PrivateKey | None = None) -> dict[str, Any]:
        """The gate's real verdict on a staged drafter against boot, by replay; key: None for the trusted one."""
        drafters = {
            name: open_drafter(self.place(place), fingerprint=self.fingerprint)
            for name, place in (("challenger", version), ("champion", "boot"))
        }
        reports = replay(self.target, drafters, self.rows, k=4, snapshot_id="tiny-rows")
        return sign(
            decide(reports["challenger"], reports["champion"], GATE, seed=0),
            digest=drafters["challenger"].digest,
            fingerprint=self.fingerprint,
            snapshot_id="tiny-rows",
            champion_digest=drafters["champion"].digest,
            job_key=f"tiny-{version}",
            key=key or self.key,
        )


def make_site(folder: Path, *, dtype: str = "float32") -> TinySite:
    """The target, boot (tau about 1.3) and the signed versions 2 (about 2.4) and 3 (about 1.8); live -> boot."""
    target = make_target(folder / "target", dtype=dtype)
    site = TinySite(target, greedy_rows(target), folder, load_or_make_key(folder / "gate.key"))
    site.publish("boot", knows=0.3, seed=1, signed=False)
    site.publish("2", knows=0.85, seed=2)
    site.publish("3", knows=0.6, seed=3)
    site.live.symlink_to(Path("drafters") / "boot")
    return site


@dataclass
class LiveServer:
    """A running server with the plug-in, and how tests talk to it."""

    server: VllmServer
    site: TinySite
    files: ServingFiles
    database: Path  # the SQLite capture log
    topic: str = TOPIC

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def token(self) -> str:
        """Of the admin route."""
        return self.files.token.read_text().strip()

    def gateway(self, tenant: str = TENANT, **more: str) -> dict[str, str]:
        """What a trusted gateway sends: gateway(subject="s", conversation="c") -> headers with its secret."""
        secret = self.files.gateway_secret.read_text().strip()
        named = {f"x-draftloop-{name}": value for name, value in more.items()}
        return {"x-draftloop-gateway-secret": secret, "x-draftloop-tenant": tenant, **named}

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        return request_json(f"{self.url}{path}", headers=headers)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        return request_json(f"{self.url}{path}", body, headers=headers)

    def admin(self, path: str, body: object = None, *, token: str | None = None) -> tuple[int, Any]:
        """A call of /draftloop/v1<path>: GET without a body; token: None for the right one, "" for none."""
        given = self.token if token is None else token
        headers = {"authorization": f"Bearer {given}"} if given else {}
        return request_json(f"{self.url}/draftloop/v1{path}", body, headers=headers)

    def status(self) -> Any:
        """GET /draftloop/v1/status; fails unless it answers 200."""
        code, body = self.admin("/status")
        assert code == 200, (code, body)
        return body

    def complete(
        self, prompt: str | list[int], *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A greedy /v1/completions of 24 tokens (more: fields of the body), tenant acme; its JSON."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0.0, **more}
        code, answer = self.post("/v1/completions", body, self.gateway() if headers is None else headers)
        assert code == 200, (code, answer)
        assert isinstance(answer, dict)
        return answer

    def chat(self, text: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
        """A greedy /v1/chat/completions of 24 tokens, tenant acme; its JSON."""
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0.0, **more}
        code, answer = self.post("/v1/chat/completions", body, self.gateway() if headers is None else headers)
        assert code == 200, (code, answer)
        assert isinstance(answer, dict)
        return answer

    def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer as they come; closing the iterator hangs up."""
        connection = http.client.HTTPConnection(*self._address(), timeout=120)
        try:
            sent = json.dumps({"model": MODEL_NAME, **body, "stream": True})
            known = {"content-type": "application/json", **(self.gateway() if headers is None else headers)}
            connection.request("POST", path, sent, known)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        finally:
            connection.close()

    def settle(self, timeout_s: float = 10.0) -> Any:
        """Wait until the hook's queue is empty; its status."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            counters = status["capture"]["counters"]
            if not counters or counters["in_queue"] == 0 or time.monotonic() > deadline:
                return status
            time.sleep(0.05)

    def records(self, *, at_least: int = 0, timeout_s: float = 10.0) -> list[CapturedRequest]:
        """Every captured record, oldest first; waits until there are that many."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._read()
            if len(found) >= at_least or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _read(self) -> list[CapturedRequest]:
        log = SqliteLog(self.database)
        try:
            entries = [
                entry
                for partition, stop in log.end_offsets(self.topic).items()
                for entry in log.read(self.topic, partition, 0, stop)
            ]
        finally:
            log.close()
        return [decode(entry.value) for entry in sorted(entries, key=lambda entry: entry.time_ms)]

    def _address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def make_server(
    site: TinySite, python: Path, folder: Path, *, drafter: Path | None = None, extra_args: tuple[str, ...] = ()
) -> LiveServer:
    """A server over the site, not started: capture into SQLite, admin token, gateway secret, one API key."""
    database = folder / "capture.db"
    folder.mkdir(parents=True, exist_ok=True)
    log = SqliteLog(database)
    log.create_topic(TOPIC, num_partitions=2)
    log.close()
    tenants = {name: TenantConsent(purpose="train") for name in (TENANT, API_TENANT)}
    files = write_serving(
        folder / "serving",
        site.fingerprint,
        consent=ConsentPolicy(version="test", tenants=tenants),
        capture=CaptureSettings(topic=TOPIC, sqlite=database),
        identity=IdentitySettings(api_keys={hashlib.sha256(API_KEY.encode()).hexdigest(): API_TENANT}),
        swap=SwapSettings(
            staging=site.staging, public_key=site.public_key, audit_file=folder / "serving" / "engine-audit.jsonl"
        ),
    )
    config = VllmConfig(python=python, extra_args=extra_args)
    server = VllmServer(
        config,
        folder,
        target=site.target_folder,
        dtype=site.fingerprint.dtype,
        drafter=drafter or site.live,
        serving=files.settings,
    )
    return LiveServer(server, site, files, database)
