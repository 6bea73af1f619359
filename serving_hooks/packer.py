"""The packer: one thread that makes entries of what was handed over, so that the serving path need not."""

from __future__ import annotations

from draftloop.serving_hooks.outbox import Outbox, Parcel


class Packer:
    """Packs parcels, in the order of the offers, until the outbox is closed."""

    def __init__(self, outbox: Outbox, target: str) -> None:
        self._outbox = outbox
        self._target = target

    def run(self) -> None:
        """The thread's life."""
        while (parcel := self._outbox.next_parcel()) is not None:
            if isinstance(parcel, bytes):
                self._outbox.pass_on(parcel)
            else:
                self._pack(parcel)
            del parcel  # nothing of a request stays while there is none to pack

    def _pack(self, parcel: Parcel) -> None:
        try:
            key, value = parcel[2].packed(self._target)
        except (AttributeError, OverflowError, TypeError, ValueError):  # something of it is of another type
            self._outbox.reject(parcel, "invalid")
        except Exception:  # noqa: BLE001  the thread's outermost guard: one odd request must not end capture
            self._outbox.reject(parcel, "unexpected")
        else:
            self._outbox.pack(parcel, key, value)
