"""Ingest: three formats, every row kept or rejected by reason, and nothing without a permission."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.pipeline.data.chat import render_prompt
from draftloop.pipeline.data.ingest import Ingested, IngestReject, Provenance, ingest
from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import CapturedRequest, Consent, decode, unpack_floats, unpack_ids
from draftloop.pipeline.stream.log import MemoryLog

TOPIC = "draftloop.raw.tiny"
CONSENT = Consent(purpose="train", policy_version="contract-7", basis="signed contract")
PROVENANCE = Provenance(tenant="acme", subject="s-1", consent=CONSENT, target="f" * 16, slices={"language": "en"})
TOKENS = {"conversation_id": "c-1", "prompt_ids": [1, 2, 3], "output_ids": [4, 5]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<end>", "?", "user", "assistant", "system", *"abcdefgh"]
    words = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)], **more}


def sharegpt(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[place % 2], "value": text} for place, text in enumerate(texts)], **more}


def file_of(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def run(path: Path, tokenizer: Any = None, **changes: Any) -> tuple[Ingested, list[CapturedRequest]]:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=1)
    options: dict[str, Any] = {"provenance": PROVENANCE, "tokenizer": tokenizer, **changes}
    result = ingest(log, TOPIC, [path], **options)
    return result, [decode(entry.value) for entry in log.read(TOPIC, 0, 0, 10**6)]


def test_each_answer_of_a_chat_becomes_the_request_that_gave_it(tmp_path: Path, tokenizer: Any) -> None:
    row = chat("a b", "c", "d", "e f")
    result, (first, second) = run(file_of(tmp_path, [row]), tokenizer)
    assert (result.num_rows, result.num_kept, result.num_records, result.rejects) == (1, 1, 2, ())
    assert unpack_ids(first.prompt_ids) == render_prompt(tokenizer, row["messages"][:1])
    assert tokenizer.decode(unpack_ids(first.output_ids)) == "c <end>"
    assert unpack_ids(second.prompt_ids) == render_prompt(tokenizer, row["messages"][:3])
    assert tokenizer.decode(unpack_ids(second.output_ids)) == "e f <end>"
    assert first.conversation_id == second.conversation_id
    assert first.record_id != second.record_id
    assert (first.tenant, first.subject, first.consent, first.target) == ("acme", "s-1", CONSENT, "f" * 16)
    assert first.slices == {"origin": "chat", "language": "en"}


def test_sharegpt_gives_the_same_tokens_as_chat(tmp_path: Path, tokenizer: Any) -> None:
    _, ours = run(file_of(tmp_path, [chat("a", "b")]), tokenizer)
    _, theirs = run(file_of(tmp_path, [sharegpt("a", "b")]), tokenizer)
    assert (ours[0].prompt_ids, ours[0].output_ids) == (theirs[0].prompt_ids, theirs[0].output_ids)
    assert theirs[0].slices["origin"] == "sharegpt"


def test_token_rows_keep_the_engine_s_ids_and_need_no_tokenizer(tmp_path: Path) -> None:
    row = {
        **TOKENS,
        "record_id": "r-9",
        "time_ms": 17,
        "finish_reason": "length",
        "temperature": 0.5,
        "logprobs": [-0.5, -1.0],
        "accepted": [1],
        "drafted": [4],
        "drafter_version": "3",
        "slices": {"language": "de"},
    }
    result, (record,) = run(file_of(tmp_path, [row]))
    assert result.num_records == 1
    assert (unpack_ids(record.prompt_ids), unpack_ids(record.output_ids)) == ([1, 2, 3], [4, 5])
    assert record.logprobs is not None
    assert unpack_floats(record.logprobs) == [-0.5, -1.0]
    assert (record.record_id, record.conversation_id, record.time_ms) == ("r-9", "c-1", 17)
    assert (record.finish_reason, record.sampling.temperature, record.drafter_version) == ("length", 0.5, "3")
    assert record.slices == {"origin": "tokens", "language": "de"}


@pytest.mark.parametrize("consent", [None, Consent(purpose="", policy_version="p", basis="b")])
def test_without_a_permission_nothing_is_ingested(tmp_path: Path, consent: Consent | None) -> None:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=1)
    provenance = Provenance(tenant="acme", subject="s", consent=consent, target="f" * 16)
    with pytest.raises(InputError, match="no permission given to keep requests of tenant 'acme'"):
        ingest(log, TOPIC, [file_of(tmp_path, [TOKENS])], provenance=provenance)
    assert log.end_offsets(TOPIC) == {0: 0}


BAD: dict[str, Any] = {
    "not_json": b'{"messages": [',
    "not_an_object": [1, 2],
    "unknown_format": {"text": "a"},
    "ambiguous_format": {**chat("a", "b"), **TOKENS},
    "no_answer": chat("a"),
    "assistant_first": {"messages": [{"role": "assistant", "content": "a"}]},
    "unknown_role": sharegpt("a", "b") | {"conversations": [{"from": "bing", "value": "a"}]},
    "no_content": {"messages": [{"role": "user", "content": None}]},
    "not_text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "broken_tools": chat("a", "b", tools="[{"),
    "not_a_conversation": {"conversations": ["a"]},
    "special_token": chat("a <end> assistant b", "c"),
    "bad_token_row": {**TOKENS, "output_ids": [-1]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_rejected_with_its_reason_beside_two_good_ones(
    tmp_path: Path, tokenizer: Any, reason: str
) -> None:
    path = file_of(tmp_path, [chat("a", "b"), BAD[reason], chat("c", "d")])
    result, records = run(path, tokenizer)
    assert result.rejects == (IngestReject(str(path), 2, reason),)
    assert result.rejected == {reason: 1}
    assert (result.num_rows, result.num_kept, len(records)) == (3, 2, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"conversation_id": ""},
        {"output_ids": [2**31]},
        {"output_ids": "4 5"},
        {"prompt_ids": None},
        {"finish_reason": "eos"},
        {"logprob": [-1.0]},
        {"logprobs": [None, -1.0]},
        {"slices": {"n": 3}},
        {"time_ms": 10**22},
        {"top_k": 2**64},
        {"accepted": [10**22], "drafted": [4]},
        {"accepted": [-1], "drafted": [4]},
    ],
)
def test_a_token_row_that_is_not_exactly_one_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    assert run(file_of(tmp_path, [{**TOKENS, **change}]))[0].rejected == {"bad_token_row": 1}


def test_a_token_row_without_its_conversation_is_rejected(tmp_path: Path) -> None:
    row = {name: value for name, value in TOKENS.items() if name != "conversation_id"}
    assert run(file_of(tmp_path, [row]))[0].rejected == {"bad_token_row": 1}


def test_bytes_that_are_no_text_are_rejected_and_empty_lines_are_no_rows(tmp_path: Path) -> None:
    result, records = run(file_of(tmp_path, [b"", b'{"\xff": 1}', b"  ", TOKENS]))
    assert (result.num_rows, result.rejected, len(records)) == (2, {"not_json": 1}, 1)


def test_a_line_nested_without_end_is_rejected_and_its_neighbour_kept(tmp_path: Path) -> None:
    result, records = run(file_of(tmp_path, [b'{"a":' * 100_000, b"[" * 100_000, TOKENS]))
    assert (result.rejected, len(records)) == ({"not_json": 2}, 1)


def test_the_same_file_again_gives_the_same_records(tmp_path: Path, tokenizer: Any) -> None:
    path = file_of(tmp_path, [chat("a", "b", "c", "d"), sharegpt("e", "f"), TOKENS])
    assert run(path, tokenizer)[1] == run(path, tokenizer)[1]


def conversation(folder: Path, row: Any, tokenizer: Any, **changes: Any) -> str:
    return run(file_of(folder, [row]), tokenizer, **changes)[1][0].conversation_id


def test_rows_of_one_conversation_share_its_id(tmp_path: Path, tokenizer: Any) -> None:
    def of(row: Any) -> str:
        return conversation(tmp_path, row, tokenizer)

    assert of(chat("a", "b")) == of(chat("a", "b", "c", "d")) != of(chat("c", "d"))
    system = {"role": "system", "content": "h"}
    with_system = [{"messages": [system, *chat(text, "b")["messages"]]} for text in ("a", "c")]
    assert of(with_system[0]) != of(with_system[1])
    assert of(chat("a", "b", id="x")) == of(chat("c", "d", id="x")) != of(chat("c", "d", id="y"))
    assert of(sharegpt("a", "b", id="x_0")) == of(sharegpt("c", "d", id="x_1"))
    assert of(chat("a", "b", id="x_0")) != of(chat("c", "d", id="x_1"))


def test_tenants_do_not_share_conversations(tmp_path: Path, tokenizer: Any) -> None:
    other = Provenance(tenant="globex", subject="s", consent=CONSENT, target="f" * 16)
    row = chat("a", "b", id="x")
    assert conversation(tmp_path, row, tokenizer) != conversation(tmp_path, row, tokenizer, provenance=other)


def test_text_rows_without_a_tokenizer_are_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="need the target's tokenizer"):
        run(file_of(tmp_path, [chat("a", "b")]))


def test_a_missing_file_or_topic_is_told_before_anything_is_appended(tmp_path: Path) -> None:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=1)
    good = file_of(tmp_path, [TOKENS])
    with pytest.raises(InputError, match=r"cannot read .*nowhere"):
        ingest(log, TOPIC, [good, tmp_path / "nowhere"], provenance=PROVENANCE)
    with pytest.raises(InputError, match="no topic 'else'"):
        ingest(log, "else", [good], provenance=PROVENANCE)
    assert log.end_offsets(TOPIC) == {0: 0}


def test_progress_is_in_bytes_and_ends_at_the_total(tmp_path: Path) -> None:
    rows = [{**TOKENS, "conversation_id": f"c-{number}"} for number in range(600)]
    path = file_of(tmp_path, rows)
    seen: list[tuple[int, int]] = []
    run(path, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3
    assert seen[-1] == (path.stat().st_size,) * 2


ANY_ROW = st.one_of(
    st.sampled_from([json.dumps(row).encode() if not isinstance(row, bytes) else row for row in BAD.values()]),
    st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"") or b"-"),
    st.builds(lambda a, b: json.dumps(chat(a, b)).encode(), st.text(max_size=5), st.text(max_size=5)),
    st.just(json.dumps(TOKENS).encode()),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ANY_ROW, max_size=12))
def test_every_row_is_kept_or_rejected_once(tmp_path: Path, tokenizer: Any, rows: list[bytes]) -> None:
    result, records = run(file_of(tmp_path, rows), tokenizer)
    assert result.num_rows == sum(1 for row in rows if row.strip())
    assert result.num_rows == result.num_kept + sum(result.rejected.values())
    assert result.num_records == len(records) == result.num_kept


@pytest.mark.parametrize(("tenant", "consent"), [("acme", None), ("acme", " "), (" ", "contract 7")])
def test_the_command_refuses_without_a_permission_before_it_loads_anything(
    tmp_path: Path, tenant: str, consent: str | None
) -> None:
    from draftloop.pipeline.config import Config
    from draftloop.pipeline.data.ingest_command import ingest_files
    from draftloop.pipeline.ui import Screen
    from draftloop.pipeline.workspace import Workspace

    workspace = Workspace(Config(work=tmp_path / "work"))
    with pytest.raises(InputError, match="nothing was ingested"):
        ingest_files(workspace, [tmp_path / "x"], tenant=tenant, consent=consent, screen=Screen(quiet=True))
    assert not (tmp_path / "work").exists()
