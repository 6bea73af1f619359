"""Features are computed once per run, batched and with the common beginning shared: none of it may show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftloop.trainers.batches import Document
from draftloop.trainers.features import FeatureStore, common_prefix, first_choice


def _documents(prefix: list[int]) -> list[Document]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for index in range(5):
        own = torch.randint(3, 131, (4 + index,), generator=generator).tolist()
        own[0] = 20 + index  # the common part ends with the prefix
        found.append(Document(f"r{index}", torch.tensor([*prefix, *own]), len(prefix) + 1, greedy=False))
    return found


def _check(target: Any, documents: list[Document], path: Path) -> None:
    store = FeatureStore(path, documents, target, "float32")
    store.fill(target, batch_tokens=40)
    assert len(store) == len(documents)
    for index, document in enumerate(documents):
        taps, last = target.features(document.token_ids[None])
        assert store[index].taps.shape[0] == len(document.token_ids) - 2
        torch.testing.assert_close(store[index].taps, taps[0, :-2], rtol=1e-4, atol=1e-4)
        teacher = last[0, document.first + 1 : -1]
        torch.testing.assert_close(store[index].teacher, teacher, rtol=1e-4, atol=1e-4)
        assert store[index].choice.tolist() == (teacher @ target.head.T).argmax(-1).tolist()
    assert path.is_file()
    store.remove()
    assert not path.exists()


def test_batched_features_equal_those_of_each_document_alone(tiny_target: Any, tmp_path: Path) -> None:
    _check(tiny_target, _documents([5, 6]), tmp_path / "f.bin")


def test_a_shared_beginning_is_run_once_and_shortens_nothing(tiny_target: Any, tmp_path: Path) -> None:
    documents = _documents(list(range(40, 56)))
    assert common_prefix([document.token_ids for document in documents]) == 16
    _check(tiny_target, documents, tmp_path / "f.bin")


def test_one_document_or_equal_documents_share_no_more_than_leaves_a_token() -> None:
    one = torch.tensor([1, 2, 3])
    assert common_prefix([one]) == 0
    assert common_prefix([one, one]) == 2
    assert common_prefix([]) == 0


def test_the_choice_of_a_greedy_document_is_what_was_logged(tiny_target: Any, tmp_path: Path) -> None:
    document = Document("r", torch.tensor([5, 6, 7, 8]), 2, greedy=True)
    store = FeatureStore(tmp_path / "f.bin", [document], tiny_target, "float32")
    store.fill(tiny_target, batch_tokens=64)
    assert store[0].choice.tolist() == [7, 8]
    assert first_choice(torch.empty(0, 32), tiny_target.head).tolist() == []
