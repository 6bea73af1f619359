"""Every error draftloop raises on purpose, as one tree.

DraftloopError                      exit code 1
├── InputError                      exit code 2: bad usage, file or setting; the message names thing and value
│   ├── ConfigError
│   ├── ModelNotFoundError
│   ├── FingerprintMismatchError
│   ├── RecordError
│   │   ├── UndecodableRecordError
│   │   ├── NewerSchemaError
│   │   └── RecordTooLargeError
│   ├── SnapshotError
│   │   └── EmptySnapshotError
│   └── CheckpointError
├── GateRefusedError                exit code 3
├── LeaseHeldError                  exit code 75
├── StorageError                    the disk or the log file refused a write
├── TrainingError
│   └── NonFiniteError              loss or gradient is not finite; the optimizer did not move
├── RegistryError
│   └── VersionNotFoundError
└── EngineError
    ├── SwapRefusedError            refused before the engine was touched
    └── SwapFailedError             failed after the engine was touched; the message says what serves now
"""

from __future__ import annotations


class DraftloopError(Exception):
    """Root of all errors raised on purpose; `mend` says what the reader can do about it."""

    exit_code = 1

    def __init__(self, message: str, *, mend: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}\n  mend: {self.mend}" if self.mend else self.message


class InputError(DraftloopError):
    """Bad usage or bad input."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, missing or out of range."""


class ModelNotFoundError(InputError):
    """No target could be loaded from the path or id given."""


class FingerprintMismatchError(InputError):
    """Two artifacts belong to different targets."""


class RecordError(InputError):
    """A record of the capture log cannot be used."""


class UndecodableRecordError(RecordError):
    """The bytes are not a record."""


class NewerSchemaError(RecordError):
    """The record was written by a newer draftloop."""


class RecordTooLargeError(RecordError):
    """The record is over the log's size limit."""


class SnapshotError(InputError):
    """A snapshot is incomplete, altered or unreadable."""


class EmptySnapshotError(SnapshotError):
    """Curation kept nothing to train on, or nothing to judge on."""


class CheckpointError(InputError):
    """A drafter folder is incomplete, altered or of another shape."""


class GateRefusedError(DraftloopError):
    """The challenger was not shown to be better."""

    exit_code = 3


class LeaseHeldError(DraftloopError):
    """Another run holds the lease."""

    exit_code = 75


class StorageError(DraftloopError):
    """A write did not reach the disk."""


class TrainingError(DraftloopError):
    """Training stopped; the last complete checkpoint is intact."""


class NonFiniteError(TrainingError):
    """Loss or gradient is NaN or infinite; the optimizer did not move."""


class RegistryError(DraftloopError):
    """The registry refused or is not there."""


class VersionNotFoundError(RegistryError):
    """No such version in the registry."""


class EngineError(DraftloopError):
    """The engine refused or failed."""


class SwapRefusedError(EngineError):
    """A drafter was refused before the engine was touched."""


class SwapFailedError(EngineError):
    """A swap failed after the engine was touched."""
