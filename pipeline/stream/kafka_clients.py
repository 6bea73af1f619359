"""kafka-python's clients for one log: each made when first needed, thrown away when it broke, never leaked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket

from draftloop.pipeline.errors import BrokerError, DraftloopError, WrongClusterError
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import client_options, probe, require_cluster, translate

T = TypeVar("T")
C = TypeVar("C", KafkaAdminClient, KafkaConsumer, "Producer")

LINGER_MS = 5  # a batch is handed over faster than that: it leaves in as few requests as may be
BATCH_BYTES = 256 * 1024
FETCH_BYTES = 2**20  # a reader holds about two answers of this size; a larger record still comes through
IDLE_READERS = 4
CLOSE_S = 2.0  # a producer's thread gets this to end
POLL_MS = 500
PAUSE_S = 0.1  # between tries at a cluster that is electing, loading or restarting

# RuntimeError: the client's event loop has ended.
_TRY_AGAIN = (kafka_errors.RetriableError, kafka_errors.UnknownBrokerIdError, RuntimeError)


class Producer(KafkaProducer):  # type: ignore[misc]
    """KafkaProducer that can be dropped with what it holds, and that its owner alone ends."""

    def __init__(self, **configs: Any) -> None:
        super().__init__(**configs)
        # Its own way out would run before the hook's, which then needs a producer for what it still holds.
        self._unregister_cleanup()

    def discard(self) -> None:
        """End it without sending what it may still hold; `close` waits for that, and fails where it takes too long."""
        self._sender.force_close()
        self._sender.join(CLOSE_S)  # a thread that waits for a frozen broker ends by itself at the request time-out
        if self._metrics:
            self._metrics.close()
        self._closed = True


class _TidySocket(KafkaNetSocket):  # type: ignore[misc]
    """kafka-python's direct connection, closed where it comes to nothing; asked for as if it were a kind of proxy."""

    SCHEMES = ("draftloop-direct",)

    async def sock_connect(self, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
        """As KafkaNetSocket, which leaves a refused socket open."""
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:  # also where the client is closed meanwhile
            sock.close()
            raise


class KafkaClients:
    """One client that asks, one producer, a few readers. Safe for threads; a forked child must make its own.

    Each failure leads to a new client and, before that, to a look at the cluster that says what is wrong with it.
    """

    def __init__(self, config: KafkaConfig) -> None:
        config.required()
        self.config = config
        self._pid = os.getpid()
        self._state = threading.Lock()  # guards the clients; never held during I/O
        self._making = threading.Lock()  # one client is made at a time
        self._asking = threading.Lock()  # more than a few questions at once are refused by the client itself
        self._control: KafkaAdminClient | None = None
        self._producer: Producer | None = None
        self._readers: list[KafkaConsumer] = []
        self._reached = False  # the probe found the cluster and no client has failed since
        self._closed = False

    def ask(self, act: str, resource: str, question: Callable[[KafkaAdminClient], T]) -> T:
        """An answer to a question, `request_timeout_s` at most; each further try with a new connection.

        act and resource are for messages, as in `translate`. Raises what `probe` and `translate` do.
        """
        deadline = time.monotonic() + self.config.request_timeout_s
        while True:
            try:
                with self._asking:
                    return self._answer(question)
            except _TRY_AGAIN as error:
                if time.monotonic() > deadline:
                    raise self.explained(error, act, resource) from error
            except kafka_errors.KafkaError as error:
                raise translate(error, self.config, act=act, resource=resource) from error
            time.sleep(PAUSE_S)

    def trouble(self) -> DraftloopError | None:
        """What is wrong with the way to the cluster; None where it is fine. Takes as long as `probe`."""
        self._reached = False
        try:
            probe(self.config)
        except DraftloopError as why:
            return why
        return None

    def explained(self, error: BaseException, act: str, resource: str) -> DraftloopError:
        """Why a client failed: trouble on the way to the cluster, else the error itself."""
        why = self.trouble() if isinstance(error, kafka_errors.RetriableError) else None
        return why or translate(error, self.config, act=act, resource=resource)

    def producer(self) -> Producer:
        """The producer. Raises what `probe` and `translate` do."""
        with self._making:
            with self._state:
                producer = self._producer
            if producer is None:
                producer = self._open(Producer, self._producer_options())
                with self._state:
                    closed = self._closed
                    if not closed:
                        self._producer = producer
                if closed:
                    producer.discard()
                    self._require_usable()
            return producer

    def drop_producer(self, producer: Producer) -> None:
        """Never use it again. What it still holds is not sent."""
        with self._state:
            if self._producer is producer:
                self._producer = None
        producer.discard()

    def take_reader(self) -> KafkaConsumer:
        """A consumer of no group, the caller's until returned. Raises what `probe` and `translate` do."""
        self._require_usable()
        with self._state:
            if self._readers:
                return self._readers.pop()
        with self._making:
            return self._open(KafkaConsumer, self._reader_options())

    def return_reader(self, reader: KafkaConsumer, *, usable: bool) -> None:
        """Hand a consumer back; one that broke is closed."""
        if usable:
            reader.unsubscribe()
            with self._state:
                usable = not self._closed and len(self._readers) < IDLE_READERS
                if usable:
                    self._readers.append(reader)
        if not usable:
            reader.close(autocommit=False)

    def close(self) -> None:
        """Close all of them. Bounded: the producer's thread gets 2 s."""
        with self._state:
            self._closed = True
            control, producer, readers = self._control, self._producer, self._readers
            self._control = self._producer = None
            self._readers = []
        if producer is not None:
            producer.discard()
        for reader in readers:
            reader.close(autocommit=False)
        if control is not None:
            control.close()

    def _answer(self, question: Callable[[KafkaAdminClient], T]) -> T:
        control = self._controller()
        try:
            return question(control)
        except _TRY_AGAIN:
            self._require_usable()
            self._reached = False
            with self._state:
                self._control = None
            control.close()
            raise

    def _controller(self) -> KafkaAdminClient:
        with self._making:
            self._require_usable()
            with self._state:
                control = self._control
            if control is None:
                control = self._open(KafkaAdminClient, {})
                with self._state:
                    closed = self._closed
                    if not closed:
                        self._control = control
                if closed:
                    control.close()
                    self._require_usable()
            return control

    def _open(self, kind: type[C], options: Mapping[str, Any]) -> C:
        """A new client, after a look at the cluster where it was not reached yet or the last client failed."""
        self._require_usable()
        if not self._reached:
            probe(self.config)
            self._reached = True
        nets: list[KafkaNetClient] = []

        def remembered(**configs: Any) -> KafkaNetClient:
            nets.append(KafkaNetClient(**configs))
            return nets[-1]

        try:
            common = {**client_options(self.config), "proxy_url": f"{_TidySocket.SCHEMES[0]}://"}
            client = kind(**{**common, **options, "kafka_client": remembered})
        except kafka_errors.KafkaError as error:
            for net in nets:  # a constructor that fails leaves its thread and sockets behind
                net.close()
            raise self.explained(error, "connect to", "the cluster") from error
        try:  # the probe saw one of the addresses, the client may have taken another
            require_cluster(nets[0].cluster.cluster_id or "", ", ".join(self.config.bootstrap), self.config)
        except WrongClusterError:
            client.close()
            raise
        return client

    def _producer_options(self) -> dict[str, Any]:
        config = self.config
        delivery_ms = max(LINGER_MS + 2, round(config.delivery_timeout_s * 1000))
        return {
            "acks": "all",
            "enable_idempotence": True,
            "compression_type": None if config.compression == "none" else config.compression,
            "linger_ms": LINGER_MS,
            "batch_size": BATCH_BYTES,
            "max_request_size": config.max_record_bytes + 65536,  # with what Kafka adds to a record
            "max_block_ms": round(config.request_timeout_s * 1000),
            "delivery_timeout_ms": delivery_ms,
            "request_timeout_ms": min(round(config.request_timeout_s * 1000), delivery_ms - LINGER_MS - 1),
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
        }

    def _reader_options(self) -> dict[str, Any]:
        return {
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",  # an offset that is gone is an error, not a jump
            "allow_auto_create_topics": False,
            "fetch_max_wait_ms": min(POLL_MS, round(self.config.request_timeout_s * 500)),
            "fetch_max_bytes": FETCH_BYTES,
            "max_partition_fetch_bytes": FETCH_BYTES,
            "metrics_enabled": False,
        }

    def _require_usable(self) -> None:
        if self._closed:
            raise BrokerError("the log is closed", mend="open it again")
        if os.getpid() != self._pid:
            raise BrokerError(
                f"the log was opened by process {self._pid} and used after a fork",
                mend="open it in the process that uses it",
            )
