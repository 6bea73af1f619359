"""The capture point, on a twin of vLLM's request state: what is watched, what a record says, what leaves nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.records import CapturedRequest, Sampling, decode, unpack_floats, unpack_ids
from draftloop.pipeline.stream.log import MemoryLog
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits
from draftloop.serving_hooks.vllm import counting, middleware, requests, versions
from draftloop.serving_hooks.vllm.middleware import Identity, internal
from draftloop.serving_hooks.vllm.runtime import Runtime

TOPIC = "draftloop.raw.x"
ACME = Identity("acme", "pseudonym", "", None, "chat")


class Kind:
    """As vLLM's RequestOutputKind."""

    def __init__(self, name: str) -> None:
        self.name = name


FINAL_ONLY, DELTA = Kind("FINAL_ONLY"), Kind("DELTA")


def params(**given: Any) -> Any:
    values = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "seed": None,
        "stop": [],
        "logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "trace_decode_token_ids": None,
        "thinking_token_budget": None,
        "output_kind": FINAL_ONLY,
    }
    return SimpleNamespace(**{**values, **given})


def request(name: str = "chatcmpl-1-0abc", **given: Any) -> Any:
    values = {
        "request_id": name,
        "external_req_id": name.rpartition("-")[0],
        "prompt_token_ids": [5, 6, 7],
        "prompt_embeds": None,
        "mm_features": None,
        "sampling_params": params(),
        "lora_request": None,
        "resumable": False,
    }
    return SimpleNamespace(**{**values, **given})


class State:
    """As much of vLLM's RequestState as capture touches, with the same calls in the same order."""

    def __init__(self, request: Any, parent: Any, index: int) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.parent_req = parent
        self.request_index = index
        self.lora_request = request.lora_request
        self.prompt_token_ids = request.prompt_token_ids
        self.output_kind = request.sampling_params.output_kind if request.sampling_params else FINAL_ONLY
        self.detokenizer = SimpleNamespace(output_token_ids=[])
        self.logprobs_processor = SimpleNamespace(logprobs=None)
        self.spec_decode_metrics: Any = None
        self.weight_version_starts: list[tuple[str, int]] = [("default", 0)]
        self.is_prefilling = True

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any, prompt: Any, parent_req: Any, request_index: int) -> State:
        return cls(request, parent_req, request_index)

    def make_request_output(self, new_token_ids: list[int], pooling_output: Any, finish_reason: str | None) -> Any:
        if finish_reason is None and self.output_kind is FINAL_ONLY:
            return None
        return self._new_completion_output(new_token_ids, finish_reason, None)

    def _new_completion_output(self, token_ids: list[int], finish_reason: str | None, stop_reason: Any) -> Any:
        return SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason)

    # What the processor does with a step's output.

    def step(self, *tokens: int, end: str | None = None) -> Any:
        self.is_prefilling = False
        self.detokenizer.output_token_ids += tokens
        return self.make_request_output(list(tokens), None, end)


class Processor:
    """As much of vLLM's OutputProcessor as counting touches."""

    def __init__(self) -> None:
        self.request_states: dict[str, State] = {}

    def process_outputs(self, engine_core_outputs: Sequence[Any]) -> None:
        for output in engine_core_outputs:
            if (state := self.request_states.get(output.request_id)) is not None:
                state.is_prefilling = False

    @staticmethod
    def _trim_surplus_tokens(req_state: Any, output: Any, num_prev_tokens: int) -> None:
        del output.new_token_ids[req_state.kept :]


class Bench:
    """A runtime with a hook on a log in memory, and vLLM's twin classes patched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = MemoryLog()
        self.log.create_topic(TOPIC, num_partitions=1)
        self.runtime = Runtime(capturing=True)
        self.hook = self.runtime.hook = CaptureHook(
            lambda: self.log,
            topic=TOPIC,
            policy=ConsentPolicy(version="3", tenants={"acme": TenantConsent()}),
            target="0123456789abcdef",
            limits=CaptureLimits(linger_s=0.001),
        )
        self.state: Any = type("PatchedState", (State,), {"from_new_request": State.__dict__["from_new_request"]})
        self.processor: Any = type("PatchedProcessor", (Processor,), dict(vars(Processor)))
        monkeypatch.setattr(versions, "request_state", lambda: self.state)
        monkeypatch.setattr(versions, "output_processor", lambda: self.processor)
        self.engine: Any = type("PatchedEngine", (), {"shutdown": lambda self, timeout=None: None})
        monkeypatch.setattr(versions, "async_llm", lambda: self.engine)
        for module in (requests, counting):
            monkeypatch.setattr(module, "current", lambda: self.runtime)
        requests.install()
        requests.install()  # as vLLM may

    def begin(self, asked: Any = None, *, who: Identity = ACME, parent: Any = None, index: int = 0) -> Any:
        token = middleware._identity.set(who)
        try:
            return self.state.from_new_request(
                tokenizer=None, request=asked or request(), prompt=None, parent_req=parent, request_index=index
            )
        finally:
            middleware._identity.reset(token)

    def records(self) -> list[CapturedRequest]:
        assert self.hook.flush(5)
        end = self.log.end_offsets(TOPIC)[0]
        return [decode(entry.value) for entry in self.log.read(TOPIC, 0, 0, end)]

    def dropped(self) -> dict[str, int]:
        return {name[8:]: count for name, count in self.hook.counters().items() if name.startswith("dropped.")}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.hook.close(5)


def spec(accepted: list[int], drafted: list[int]) -> Any:
    histogram = [accepted.count(count) for count in range(5)]
    return SimpleNamespace(
        per_step_accepted=accepted, per_step_drafted=drafted, histogram=histogram, num_draft_tokens=sum(drafted)
    )


def test_a_finished_choice_becomes_one_record_with_what_the_engine_ran(bench: Bench) -> None:
    asked = request(sampling_params=params(temperature=0.7, top_p=0.9, top_k=-1, max_tokens=8, seed=4))
    bench.runtime.serve("3", "d", "t")
    state = bench.begin(asked, who=ACME._replace(conversation="c-7"))
    state.step(1)
    state.step(2, 3)
    state.spec_decode_metrics = spec([1, 2], [4, 4])
    state.step(4, 8, 9, end="stop")
    (record,) = bench.records()
    assert (record.record_id, record.conversation_id) == ("chatcmpl-1-0abc", "c-7")
    assert (record.tenant, record.subject, record.target) == ("acme", "pseudonym", "0123456789abcdef")
    assert (record.consent.basis, record.consent.policy_version) == ("tenant-policy", "3")
    assert (unpack_ids(record.prompt_ids), unpack_ids(record.output_ids)) == ([5, 6, 7], [1, 2, 3, 4, 8, 9])
    assert (record.accepted, record.drafted, record.finish_reason) == ((1, 2), (4, 4), "stop")
    assert record.sampling == Sampling(temperature=0.7, top_p=0.9, top_k=0, max_tokens=8, seed=4)
    assert record.slices == {"route": "chat", "stream": "no"}
    assert (record.drafter_version, record.logprobs) == ("3", None)
    assert bench.runtime.timing.summary()["count"] == 1


def test_a_record_says_when_the_drafter_changed_under_way(bench: Bench) -> None:
    bench.runtime.serve("3", "d", "t")
    swapped, undone = bench.begin(), bench.begin(request("chatcmpl-2-0abc"))
    bench.runtime.serve("4", "d", "t")
    swapped.step(1, end="stop")
    bench.runtime.count_swap("failed")
    undone.step(1, end="stop")
    bench.begin(request("chatcmpl-3-0abc")).step(1, end="stop")
    found = [(record.drafter_version, record.slices.get("drafter")) for record in bench.records()]
    assert found == [("4", "changed"), ("4", "changed"), ("4", None)]


def test_what_a_client_writes_into_its_request_id_is_not_kept(bench: Bench) -> None:
    bench.begin(request("chatcmpl-ana@example.org said so-0abc")).step(1, end="stop")
    (record,) = bench.records()
    assert record.record_id == record.conversation_id
    assert len(record.record_id) == 32


def test_streaming_and_not_make_equal_records(bench: Bench) -> None:
    for name, kind in (("a-0", FINAL_ONLY), ("b-0", DELTA)):
        state = bench.begin(request(name, sampling_params=params(output_kind=kind)))
        state.step(1)
        state.spec_decode_metrics = spec([1], [4])
        state.step(2, 3, end="length")
    one, other = bench.records()
    assert (one.slices.pop("stream"), other.slices.pop("stream")) == ("no", "yes")
    ignored = {"record_id": "", "conversation_id": "", "time_ms": 0}
    assert _replaced(one, **ignored) == _replaced(other, **ignored)


def _replaced(record: CapturedRequest, **changes: Any) -> CapturedRequest:
    import msgspec

    return msgspec.structs.replace(record, **changes)


def test_each_choice_is_a_record_of_one_conversation(bench: Bench) -> None:
    parent = SimpleNamespace(request_id="chatcmpl-1-0abc")
    states = [
        bench.begin(request(f"{index}_chatcmpl-1-0abc", external_req_id="chatcmpl-1"), parent=parent, index=index)
        for index in range(3)
    ]
    for state in reversed(states):
        state.step(1, end="stop")
    assert [record.record_id for record in bench.records()] == [
        "chatcmpl-1-0abc-2",
        "chatcmpl-1-0abc-1",
        "chatcmpl-1-0abc",
    ]
    (conversation,) = {record.conversation_id for record in bench.records()}
    assert "chatcmpl" not in conversation  # a client may have chosen that name


@pytest.mark.parametrize(
    ("vllms", "ours"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "abort"), ("repetition", "stop")],
)
def test_every_end_has_its_name(bench: Bench, vllms: str, ours: str) -> None:
    bench.begin().step(1, end=vllms)
    (record,) = bench.records()
    assert record.finish_reason == ours


def test_an_aborted_choice_is_kept_with_the_tokens_it_had(bench: Bench) -> None:
    state = bench.begin()
    state.step(1)
    state.step(2, 3)
    state.step(end="abort")
    (record,) = bench.records()
    assert (unpack_ids(record.output_ids), record.finish_reason, record.accepted) == ([1, 2, 3], "abort", ())


def test_what_still_runs_when_the_process_ends_is_aborted_once(bench: Bench) -> None:
    processor = bench.processor()
    states = {name: bench.begin(request(name)) for name in ("a-0", "b-0")}
    states["denied"] = bench.begin(who=Identity())
    processor.request_states = states
    for state in states.values():
        state.step(1)
    bench.engine().shutdown(timeout=0)
    requests.end_all(bench.runtime)  # as at the exit
    states["a-0"].step(end="abort")
    assert [(record.record_id, record.finish_reason) for record in bench.records()] == [
        ("a-0", "abort"),
        ("b-0", "abort"),
    ]


def test_with_stop_strings_steps_are_counted_as_they_come(bench: Bench) -> None:
    state = bench.begin(request(sampling_params=params(stop=["x"])))
    for tokens in ((1,), (2, 3, 4), (5,)):
        state.step(*tokens)
    state.step(6, 7, end="stop")  # a third one was trimmed, and the engine's own counts never come
    (record,) = bench.records()
    assert (record.accepted, record.drafted) == ((2, 0, 1), ())


def test_steps_whose_drafts_a_grammar_threw_out_are_steps(bench: Bench) -> None:
    for name, metrics in (("a-0", spec([], [])), ("b-0", spec([0, 1], [2, 4]))):
        state = bench.begin(request(name, sampling_params=params(structured_outputs="json")))
        state.step(1)
        state.step(2)
        state.spec_decode_metrics = metrics
        state.step(3, 4, end="length")
    assert [(record.accepted, record.drafted) for record in bench.records()] == [((0, 1), ()), ((0, 1), (2, 4))]


def test_without_consent_nothing_is_attached_and_one_counter_moves(bench: Bench) -> None:
    state = bench.begin(who=ACME._replace(tenant="nobody"))
    assert not {"_new_completion_output", "make_request_output"} & set(vars(state))
    state.step(1, end="stop")
    assert (bench.records(), bench.dropped()) == ([], {"policy:no_consent": 1})


def test_a_denial_and_a_gateways_word_reach_the_decision(bench: Bench) -> None:
    bench.begin(who=ACME._replace(asserted="deny")).step(1, end="stop")
    bench.begin(who=Identity("newco", asserted="train")).step(1, end="stop")
    (record,) = bench.records()
    assert (record.tenant, record.consent.basis) == ("newco", "gateway")
    assert bench.dropped() == {"policy:denied": 1}


def test_a_policy_that_ends_in_between_ends_it(bench: Bench) -> None:
    state = bench.begin()
    bench.hook.set_policy(ConsentPolicy(version="4"))
    state.step(1, end="stop")
    assert (bench.records(), bench.dropped()) == ([], {"policy:no_consent": 1})


def test_switched_off_nothing_is_looked_at_and_what_runs_is_not_kept(bench: Bench) -> None:
    running = bench.begin()
    bench.runtime.capturing = False
    bench.begin(who=Identity()).step(1, end="stop")
    running.step(1, end="stop")
    assert (bench.records(), bench.dropped()) == ([], {"switched_off": 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_request": "adapter"}, "lora"),
        ({"resumable": True}, "streaming_input"),
        ({"prompt_token_ids": None}, "prompt_embeddings"),
        ({"prompt_embeds": "tensor"}, "prompt_embeddings"),
        ({"mm_features": ["image"]}, "multimodal"),
        ({"external_req_id": "cmpl-1-beam-3", "sampling_params": params(max_tokens=1)}, "beam_search"),
    ],
)
def test_what_is_not_the_target_answering_its_tokens_is_counted(
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    bench.begin(request(**changes)).step(1, end="stop")
    assert (bench.records(), bench.dropped()) == ([], {reason: 1})


def test_pooling_requests_leave_nothing(bench: Bench) -> None:
    bench.begin(request(sampling_params=None))
    assert bench.hook.counters()["offered"] == 0


def test_our_own_requests_leave_nothing(bench: Bench) -> None:
    with internal():
        state = bench.begin()
    state.step(1, end="stop")
    assert bench.hook.counters()["offered"] == 0


def test_a_gateways_slices_stand_beside_our_own_and_never_in_their_place(bench: Bench) -> None:
    said = (("domain", "kitchen"), ("route", "mine"))
    bench.begin(who=ACME._replace(slices=said)).step(1, end="stop")
    (record,) = bench.records()
    assert record.slices == {"domain": "kitchen", "route": "chat", "stream": "no"}


def test_slices_tell_updated_weights_and_altered_logits(bench: Bench) -> None:
    state = bench.begin(request(sampling_params=params(structured_outputs="json")))
    state.weight_version_starts = [("default", 0), ("step-7", 3)]
    state.step(1, end="stop")
    (record,) = bench.records()
    assert record.slices == {"route": "chat", "stream": "no", "weights": "step-7", "logits": "altered"}


def test_log_probabilities_are_taken_where_they_are_and_fit(bench: Bench) -> None:
    def position(token: int, value: float) -> dict[int, Any]:
        return {99: SimpleNamespace(logprob=-9.0), token: SimpleNamespace(logprob=value)}

    flat = SimpleNamespace(start_indices=[0, 2], logprobs=[-0.5, -9.0, -1.5, -9.0], __len__=lambda: 2)
    flat = type("Flat", (), {**vars(flat), "__len__": lambda self: 2})()
    for name, made in (("a-0", [position(1, -0.5), position(2, -1.5)]), ("b-0", flat), ("c-0", [position(1, -0.5)])):
        state = bench.begin(request(name, sampling_params=params(logprobs=1)))
        state.logprobs_processor.logprobs = made
        state.step(1)
        state.step(2, end="stop")
    found = [None if each.logprobs is None else unpack_floats(each.logprobs) for each in bench.records()]
    assert found == [[-0.5, -1.5], [-0.5, -1.5], None]


def test_where_vllm_gives_logits_in_their_place_none_are_taken(bench: Bench) -> None:
    bench.runtime.takes_logprobs = False
    state = bench.begin(request(sampling_params=params(logprobs=0)))
    state.logprobs_processor.logprobs = [{1: SimpleNamespace(logprob=17.0)}]
    state.step(1, end="stop")
    assert bench.records()[0].logprobs is None


def test_whatever_goes_wrong_in_capture_the_request_goes_on(bench: Bench) -> None:
    state = bench.begin(request(external_req_id=None))
    del state.detokenizer.output_token_ids
    assert state.make_request_output([], None, "stop").finish_reason == "stop"
    assert (bench.records(), bench.dropped()) == ([], {"unexpected": 1})


def test_an_ended_state_is_freed_without_the_garbage_collector(bench: Bench) -> None:
    gc.disable()
    try:
        state = bench.begin(request(sampling_params=params(stop=["x"])))
        state.step(1, end="stop")
        gone = weakref.ref(state)
        bench.records()
        del state
        assert gone() is None
    finally:
        gc.enable()


@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(4, 6)), max_size=20),
    cut=st.integers(0, 30),
)
def test_fitted_steps_add_up_to_what_the_user_got(steps: list[tuple[int, int]], cut: int) -> None:
    accepted, drafted = [each[0] for each in steps], [each[1] for each in steps]
    whole = 1 + sum(accepted) + len(accepted)
    num_outputs = max(1, whole - cut)
    kept, proposed = requests.fitted(accepted, drafted, num_outputs)
    assert 1 + sum(kept) + len(kept) == num_outputs
    assert len(proposed) == len(kept)
    assert list(proposed) == drafted[: len(kept)]
    assert list(kept[:-1]) == accepted[: len(kept)][:-1]


def test_steps_that_are_missing_are_left_missing() -> None:
    assert requests.fitted([1, 0], [4, 4], 10) == ((1, 0), (4, 4))
    assert requests.fitted([1, 0], [4, 4], 0) == ((), ())


def test_capture_status_is_numbers_only(bench: Bench) -> None:
    bench.begin().step(1, end="stop")
    assert bench.hook.flush(5)
    found = requests.capture_status()
    assert (found["capturing"], found["last_error"], found["counters"]["delivered"]) == (True, None, 1)
    timing = found["serving_us"]
    assert timing["count"] == 1
    assert 0 < timing["p50"] <= timing["p99"] <= timing["max"]


def stats(*, generated: int, firsts: int, steps: int) -> Any:
    return SimpleNamespace(
        num_generation_tokens=generated,
        time_to_first_tokens_iter=[0.1] * firsts,
        inter_token_latencies_iter=[0.1] * steps,
    )


def drafts(drafted: int, accepted: int) -> Any:
    return SimpleNamespace(spec_decoding_stats=SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted))


def test_a_steps_tokens_less_the_first_ones_are_emitted(bench: Bench) -> None:
    counting.count_step(bench.runtime, drafts(8, 3), stats(generated=6, firsts=1, steps=2))
    counting.count_step(bench.runtime, None, None)
    counters = bench.runtime.counters
    assert (counters.num_steps, counters.num_emitted, counters.num_drafted, counters.num_accepted) == (2, 5, 8, 3)


def test_tokens_past_a_stop_string_are_not_emitted(bench: Bench) -> None:
    output = SimpleNamespace(new_token_ids=[1, 2, 3])
    bench.processor._trim_surplus_tokens(SimpleNamespace(kept=1), output, 0)
    counting.count_step(bench.runtime, None, stats(generated=3, firsts=0, steps=1))
    assert (bench.runtime.counters.num_steps, bench.runtime.counters.num_emitted) == (1, 1)


def test_outputs_without_a_token_are_neither_steps_nor_first_tokens(bench: Bench) -> None:
    processor = bench.processor()
    fresh, running = bench.begin(request("a-0")), bench.begin(request("b-0"))
    running.step(1)
    processor.request_states = {"a": fresh, "b": running}
    ends = [SimpleNamespace(request_id=name, new_token_ids=[]) for name in ("a", "b", "gone")]
    processor.process_outputs(ends)
    counting.count_step(bench.runtime, None, stats(generated=0, firsts=1, steps=1))
    assert (bench.runtime.counters.num_steps, bench.runtime.counters.num_emitted) == (0, 0)


def test_our_own_requests_are_not_in_the_counters(bench: Bench) -> None:
    with internal():
        own = bench.begin()
    own.step(1)
    counting.count_step(bench.runtime, None, stats(generated=1, firsts=1, steps=0))
    own.step(2, 3)  # beside a request of traffic that got one token
    counting.count_step(bench.runtime, drafts(8, 1), stats(generated=3, firsts=0, steps=2))
    assert (bench.runtime.counters.num_steps, bench.runtime.counters.num_emitted) == (1, 1)
    own.spec_decode_metrics = spec([1, 0], [4, 4])
    own.step(4, end="stop")
    counting.count_step(bench.runtime, drafts(4, 0), stats(generated=1, firsts=0, steps=1))
    counters = bench.runtime.counters
    assert (counters.num_steps, counters.num_emitted, counters.num_drafted, counters.num_accepted) == (1, 1, 4, 0)
