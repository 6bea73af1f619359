"""`draftloop ingest`: what the command line says, turned into a provenance for `ingest`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftloop.pipeline.data.ingest import Provenance, ingest
from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import Consent
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace


def ingest_files(
    workspace: Workspace, files: Sequence[Path], *, tenant: str, consent: str | None, screen: Screen
) -> dict[str, Any]:
    """Append files to the workspace's raw topic; the ledger as plain values: read, kept, rejected, records, examples.

    `consent` is the basis of the permission to train. Raises InputError without one, before the target is loaded.
    """
    if not tenant.strip():
        raise InputError("the tenant has no name: nothing was ingested", mend="name it with --tenant")
    if consent is None or not consent.strip():
        raise InputError(
            f"no permission given to keep requests of tenant {tenant!r}: nothing was ingested",
            mend='say what it rests on, for example --consent "contract 2026-04"',
        )
    target = workspace.load_target()
    provenance = Provenance(
        tenant=tenant,
        subject="none",  # a foreign log does not say
        consent=Consent(purpose="train", policy_version="ingest", basis=consent),
        target=target.fingerprint.digest,
    )
    log = workspace.open_log()
    try:
        with screen.bar("ingest (bytes)", 0) as bar:

            def show(done: int, total: int) -> None:
                bar.total(total)
                bar(done)

            result = ingest(
                log,
                workspace.raw_topic(),
                files,
                provenance=provenance,
                tokenizer=target.tokenizer,
                end_ids=target.eos_ids,
                on_progress=show,
            )
    finally:
        log.close()
    return {
        "read": result.num_rows,
        "kept": result.num_kept,
        "records": result.num_records,
        "rejected": result.rejected,
        "examples": [reject._asdict() for reject in result.rejects[:10]],  # where to look, never what is there
    }
