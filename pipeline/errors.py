"""Every error draftloop raises on purpose, as one tree.

DraftloopError                      exit code 1
├── InputError                      exit code 2: bad usage, file or setting; the message names thing and value
│   ├── ConfigError
│   ├── ModelNotFoundError
│   ├── FingerprintMismatchError
│   ├── MissingTopicError           the log has no topic of that name
│   ├── RecordError
│   │   ├── UndecodableRecordError
│   │   ├── NewerSchemaError
│   │   └── RecordTooLargeError
│   ├── SnapshotError
│   │   └── EmptySnapshotError
│   └── CheckpointError
├── GateRefusedError                exit code 3
├── LeaseHeldError                  exit code 75
├── StorageError                    the disk or the log refused a write
│   └── AppendError                 some entries of a batch did not arrive; says which
├── BrokerError                     Kafka refused or is not there
│   ├── BrokerUnreachableError      nothing answers at the address
│   ├── TlsError                    TLS against plain text, or a certificate for another host
│   │   ├── UnknownCaError          the broker's certificate is not from the CA given
│   │   ├── CertificateExpiredError the broker's or our own certificate is out of date
│   │   └── ClientCertificateError  the broker wants a certificate of ours, or refuses the one it got
│   ├── AuthenticationError         wrong password, unknown user, refused token
│   ├── AccessDeniedError           an ACL is missing
│   ├── ClockError                  a record's time is further ahead than the topic takes
│   ├── WrongClusterError           the broker belongs to another cluster than the one pinned
│   └── LocalBrokerError            a broker on this machine could not be started or stopped
│       ├── JavaNotFoundError
│       └── KafkaJarsNotFoundError
├── AccessSurpriseError             `access verify` saw something allowed or forbidden that should not be
├── TrainingError
│   └── NonFiniteError              loss or gradient is not finite; the optimizer did not move
├── RegistryError
│   └── VersionNotFoundError
└── EngineError
    ├── EngineUnreachableError      nothing answers at the engine's address
    ├── EngineUnsupportedError      this engine, or this release of it, is not supported
    ├── AdminDeniedError            the engine's admin route wants another token, or no call from this machine
    ├── SwapRefusedError            refused before the engine was touched
    │   └── SwapBusyError           another swap is under way
    └── SwapFailedError             failed after the engine was touched; the message says what serves now
        └── ReplicaLostError        the engine cannot be brought back by us: this replica must be restarted
"""

from __future__ import annotations

from collections.abc import Mapping


class DraftloopError(Exception):
    """Root of all errors raised on purpose; `mend` says what the reader can do about it."""

    exit_code = 1
    reason = "log_error"  # what a dropped record is counted under when this kept it from the log

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


class MissingTopicError(InputError):
    """The log has no topic of that name."""

    reason = "missing_topic"


class RecordError(InputError):
    """A record of the capture log cannot be used."""


class UndecodableRecordError(RecordError):
    """The bytes are not a record."""


class NewerSchemaError(RecordError):
    """The record was written by a newer draftloop."""


class RecordTooLargeError(RecordError):
    """The record is over the log's size limit."""

    reason = "too_large"


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


class AppendError(StorageError):
    """Some entries of a batch did not arrive; every index in neither map did."""

    def __init__(
        self,
        message: str,
        *,
        refused: Mapping[int, DraftloopError],
        failed: Mapping[int, DraftloopError],
        mend: str | None = None,
    ) -> None:
        """refused: index -> why it never will arrive. failed: index -> why it did not this time."""
        super().__init__(message, mend=mend)
        self.refused = dict(refused)
        self.failed = dict(failed)


class BrokerError(DraftloopError):
    """Kafka refused or is not there."""

    reason = "broker_error"


class BrokerUnreachableError(BrokerError):
    """Nothing answers at the address."""

    reason = "unreachable"


class TlsError(BrokerError):
    """TLS against plain text, or a certificate for another host."""

    reason = "tls"


class UnknownCaError(TlsError):
    """The broker's certificate is not from the CA given."""


class CertificateExpiredError(TlsError):
    """The broker's or our own certificate is out of date."""


class ClientCertificateError(TlsError):
    """The broker wants a certificate of ours, or refuses the one it got."""


class AuthenticationError(BrokerError):
    """Wrong password, unknown user or refused token."""

    reason = "authentication"


class AccessDeniedError(BrokerError):
    """An ACL is missing: the message names principal, operation and resource."""

    reason = "access_denied"


class ClockError(BrokerError):
    """A record's time is further ahead than the topic takes: this machine's clock, or the broker's, is wrong."""

    reason = "clock"


class WrongClusterError(BrokerError):
    """The broker belongs to another cluster than the one pinned."""

    reason = "wrong_cluster"


class LocalBrokerError(BrokerError):
    """A broker on this machine could not be started or stopped."""


class JavaNotFoundError(LocalBrokerError):
    """No Java, or one too old."""


class KafkaJarsNotFoundError(LocalBrokerError):
    """No folder with Kafka's jars."""


class AccessSurpriseError(DraftloopError):
    """`access verify` saw an act allowed that should be forbidden, or the other way round."""


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


class EngineUnreachableError(EngineError):
    """Nothing answers at the engine's address."""


class EngineUnsupportedError(EngineError):
    """This engine, or this release of it, is not supported."""


class AdminDeniedError(EngineError):
    """The engine's admin route wants another token, or no call from this machine."""


class SwapRefusedError(EngineError):
    """A drafter was refused before the engine was touched."""


class SwapBusyError(SwapRefusedError):
    """Another swap is under way."""


class SwapFailedError(EngineError):
    """A swap failed after the engine was touched."""


class ReplicaLostError(SwapFailedError):
    """The engine cannot be brought back by us: this replica must be restarted."""
