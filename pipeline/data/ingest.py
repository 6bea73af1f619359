"""Logs from elsewhere into the capture log: OpenAI-style chat, ShareGPT, and engine logs with token ids, as JSON lines.

Text is rendered once, by the target's own template, and every assistant turn becomes the record of the request that
would have produced it. Nothing is ingested without a permission named by the caller. Ingesting a file twice gives the
same record ids, so curation counts each row once.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from draftloop.pipeline.data.chat import ROLES, ChatRejectError, ChatTokenizer, Turn, turns
from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import CapturedRequest, Consent, FinishReason, Sampling, encode, pack_floats, pack_ids
from draftloop.pipeline.stream.log import CaptureLog, LogEntry

BATCH_ROWS = 256
# ShareGPT's names of the two sides; any other is a reject, as in chat.
SHAREGPT_ROLES: Mapping[str, str] = {**ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant"}

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Whose rows these are and by what permission they may be kept. Without `consent` nothing is ingested."""

    tenant: str
    subject: str  # pseudonymous
    consent: Consent | None
    target: str  # Fingerprint.digest of the target whose outputs these are
    slices: Mapping[str, str] = field(default_factory=dict)  # added to every record; a row's own slices win


class IngestReject(NamedTuple):
    """A row that was not taken. Line numbers start at 1."""

    path: str
    line: int
    reason: str


@dataclass(frozen=True)
class Ingested:
    """The ledger: num_rows == num_kept + len(rejects); a kept chat row gives one record for each assistant turn."""

    num_rows: int
    num_kept: int
    num_records: int
    rejects: tuple[IngestReject, ...]

    @property
    def rejected(self) -> dict[str, int]:
        """Rejects by reason."""
        return dict(sorted(Counter(reject.reason for reject in self.rejects).items()))


class _TokenRow(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A line of an engine log with token ids."""

    conversation_id: str
    prompt_ids: list[TokenId]
    output_ids: list[TokenId]
    record_id: str | None = None
    time_ms: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    finish_reason: FinishReason = "stop"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Count = 0
    logprobs: list[float] | None = None
    accepted: tuple[Count, ...] = ()
    drafted: tuple[Count, ...] = ()
    drafter_version: str | None = None
    target: str | None = None
    slices: dict[str, str] = {}


class _RejectedError(InputError):
    """Internal: this row is not taken, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ingest(
    log: CaptureLog,
    topic: str,
    paths: Sequence[Path],
    *,
    provenance: Provenance,
    tokenizer: ChatTokenizer | None = None,
    end_ids: frozenset[int] = frozenset(),
    on_progress: Callable[[int, int], None] | None = None,
) -> Ingested:
    """Append every usable row of some JSONL files to a topic; the format is told by each row's own fields.

    `tokenizer` is needed for text rows, `end_ids` as in `chat.turns`. `on_progress(bytes_done, bytes_total)`.
    Raises InputError (no permission given, no such file or topic), StorageError (the log; run the same files again).
    """
    consent = _require_consent(provenance)
    log.end_offsets(topic)  # an unknown topic is told before the first row is rendered
    total = sum(_size(path) for path in paths)
    num_rows = num_kept = num_records = bytes_done = 0
    rejects: list[IngestReject] = []
    pending: list[LogEntry] = []
    for path, number, line in _lines(paths):
        bytes_done += len(line)
        if line.strip():
            num_rows += 1
            try:
                records = _records(line, provenance, consent, tokenizer, end_ids)
            except (ChatRejectError, _RejectedError) as error:
                rejects.append(IngestReject(str(path), number, error.reason))
            else:
                num_kept += 1
                num_records += len(records)
                pending += [LogEntry(record.conversation_id.encode(), encode(record)) for record in records]
        if len(pending) >= BATCH_ROWS or bytes_done == total:
            log.append(topic, pending)
            pending = []
            if on_progress is not None:
                on_progress(bytes_done, total)
    log.append(topic, pending)
    assert num_rows == num_kept + len(rejects)
    return Ingested(num_rows, num_kept, num_records, tuple(rejects))


def _require_consent(provenance: Provenance) -> Consent:
    if provenance.consent is None or not provenance.consent.purpose:
        raise InputError(
            f"no permission given to keep requests of tenant {provenance.tenant!r}: nothing was ingested",
            mend="name the purpose, policy version and basis of the tenant's consent",
        )
    return provenance.consent


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", mend="check the path") from error


def _lines(paths: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    for path in paths:
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    yield path, number, line
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", mend="check the path") from error


def _records(
    line: bytes,
    provenance: Provenance,
    consent: Consent,
    tokenizer: ChatTokenizer | None,
    end_ids: frozenset[int],
) -> list[CapturedRequest]:
    """The records of one row. Raises ChatRejectError, _RejectedError."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _RejectedError("not_json") from error
    if not isinstance(row, dict):
        raise _RejectedError("not_an_object")
    kinds = [kind for kind in ("messages", "conversations", "prompt_ids") if kind in row]
    if len(kinds) != 1:
        raise _RejectedError("unknown_format" if not kinds else "ambiguous_format")
    if kinds == ["prompt_ids"]:
        return [_of_tokens(row, line, provenance, consent)]
    if tokenizer is None:
        raise InputError("text rows need the target's tokenizer", mend="name the target, or ingest rows with token ids")
    messages, roles = (row["messages"], ROLES) if kinds == ["messages"] else (_sharegpt(row), SHAREGPT_ROLES)
    rendered = turns(tokenizer, messages, tools=row.get("tools"), end_ids=end_ids, roles=roles)
    if not rendered:
        raise _RejectedError("no_answer")
    conversation = _conversation_id(row, messages, provenance.tenant)
    slices = {"origin": "chat" if kinds == ["messages"] else "sharegpt", **provenance.slices}
    name = hashlib.sha256(provenance.tenant.encode() + b"\0" + line.strip()).hexdigest()[:24]
    return [
        _of_turn(turn, f"in-{name}-{place}", conversation, slices, provenance, consent)
        for place, turn in enumerate(rendered)
    ]


def _of_turn(
    turn: Turn, record_id: str, conversation: str, slices: dict[str, str], provenance: Provenance, consent: Consent
) -> CapturedRequest:
    return CapturedRequest(
        record_id=record_id,
        time_ms=0,  # not known
        conversation_id=conversation,
        tenant=provenance.tenant,
        subject=provenance.subject,
        consent=consent,
        target=provenance.target,
        drafter_version=None,
        prompt_ids=pack_ids(turn.prompt_ids),
        output_ids=pack_ids(turn.output_ids),
        finish_reason="stop",
        sampling=Sampling(temperature=1.0),  # text does not say; greedy would be a claim
        slices=slices,
    )


def _of_tokens(row: dict[str, Any], line: bytes, provenance: Provenance, consent: Consent) -> CapturedRequest:
    try:
        tokens = msgspec.convert(row, _TokenRow)
        logprobs = None if tokens.logprobs is None else pack_floats(tokens.logprobs)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _RejectedError("bad_token_row") from error
    if not tokens.conversation_id:
        raise _RejectedError("bad_token_row")
    name = hashlib.sha256(provenance.tenant.encode() + b"\0" + line.strip()).hexdigest()[:24]
    return CapturedRequest(
        record_id=tokens.record_id or f"in-{name}",
        time_ms=tokens.time_ms,
        conversation_id=tokens.conversation_id,
        tenant=provenance.tenant,
        subject=provenance.subject,
        consent=consent,
        target=tokens.target or provenance.target,
        drafter_version=tokens.drafter_version,
        prompt_ids=pack_ids(tokens.prompt_ids),
        output_ids=pack_ids(tokens.output_ids),
        finish_reason=tokens.finish_reason,
        sampling=Sampling(temperature=tokens.temperature, top_p=tokens.top_p, top_k=tokens.top_k),
        logprobs=logprobs,
        accepted=tokens.accepted,
        drafted=tokens.drafted,
        slices={"origin": "tokens", **provenance.slices, **tokens.slices},
    )


def _sharegpt(row: dict[str, Any]) -> list[dict[str, Any]]:
    said = row["conversations"]
    if not isinstance(said, list) or not all(isinstance(part, dict) and "from" in part for part in said):
        raise _RejectedError("not_a_conversation")
    return [{"role": part["from"], "content": part.get("value")} for part in said]


def _conversation_id(row: dict[str, Any], messages: Sequence[Mapping[str, Any]], tenant: str) -> str:
    """The row's own id, or a hash of how the conversation opens, so that a later turn of it lands beside this one."""
    given = row.get("conversation_id", row.get("id"))
    if isinstance(given, str | int) and str(given):
        # ShareGPT files cut long conversations into rows `x_0`, `x_1`, ...: one conversation, one side of the split.
        opening = re.sub(r"_\d+$", "", str(given)) if "conversations" in row else str(given)
    else:
        first = next(place for place, message in enumerate(messages) if message["role"] not in ("system", "developer"))
        opening = msgspec.json.encode(list(messages[: first + 1])).decode()
    return "in-" + hashlib.sha256(f"{tenant}\0{opening}".encode()).hexdigest()[:24]
