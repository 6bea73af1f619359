"""`draftloop bench log`: our log on Kafka beside confluent-kafka, same broker, same records, same run.

Every measurement is a fresh process (`python -m draftloop.pipeline.stream.kafka_bench`): its CPU time is its own.
CPU per record is the steady number; records per second also depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from draftloop.pipeline.errors import BrokerError, ConfigError
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client
from draftloop.pipeline.stream.kafka_connect import client_options
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry

Client = Literal["draftloop", "confluent"]
CLIENTS: tuple[Client, ...] = ("draftloop", "confluent")
NUM_PARTITIONS = 4
BATCH = 256  # records an append, as the hook's sender makes them
LINGER_MS = 20
TIMEOUT_S = 300.0
POOL = 512  # different payloads; more would measure the generator


def bench_log(
    client_file: Path,
    *,
    records: int,
    record_bytes: int,
    rounds: int,
    on_progress: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Medians over interleaved rounds of each client's produce and consume, and ours over the other's CPU.

    `client_file` must be allowed to create and delete topics (the admin's). Raises BrokerError, ConfigError.
    """
    log = KafkaLog(read_client(client_file))
    prefix = read_client(client_file).topic_prefix
    topics: list[str] = []
    seen: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
    try:
        for number in range(rounds):
            # Whoever goes first meets a cold broker: take turns.
            for client in CLIENTS if number % 2 == 0 else CLIENTS[::-1]:
                topic = f"{prefix}bench.{uuid.uuid4().hex[:12]}"
                topics.append(topic)
                log.create_topic(topic, num_partitions=NUM_PARTITIONS)
                time.sleep(1.0)  # the broker answers for a new topic a moment later
                seen[client].append(_measure(client, client_file, topic, records, record_bytes))
                if on_progress is not None:
                    on_progress(sum(map(len, seen.values())), client)
        return _summary(seen, records=records, record_bytes=record_bytes, rounds=rounds)
    finally:
        log.close()
        _delete(read_client(client_file), topics)


def table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['records']} records of {result['record_bytes']} bytes, {result['rounds']} rounds, medians [range]"
    ]
    for client in CLIENTS:
        for way in ("produce", "consume"):
            one = result["clients"][client][way]
            lines.append(
                f"{client:<10} {way:<8} {one['records_per_s']:>9,.0f} records/s   {one['cpu_us']:>6.1f} us CPU/record"
                f" [{one['cpu_us_low']:.1f}-{one['cpu_us_high']:.1f}]"
            )
    ratio = result["cpu_ratio"]
    lines.append(
        f"our CPU per record over confluent-kafka's: produce {ratio['produce']:.2f}, consume {ratio['consume']:.2f}"
    )
    return "\n".join(lines)


def _delete(config: KafkaConfig, topics: list[str]) -> None:
    from kafka.admin import KafkaAdminClient

    admin = KafkaAdminClient(**client_options(config))
    try:
        admin.delete_topics(topics)
    finally:
        admin.close()


def _measure(client: Client, file: Path, topic: str, records: int, record_bytes: int) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    arguments = ["--client", client, "--file", str(file), "--topic", topic]
    sizes = ["--records", str(records), "--record-bytes", str(record_bytes)]
    done = subprocess.run(
        [*command, *arguments, *sizes], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise BrokerError(
            f"the measurement of {client} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}",
            mend="check the broker with `draftloop doctor`",
        )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _summary(
    seen: dict[str, list[dict[str, float]]], *, records: int, record_bytes: int, rounds: int
) -> dict[str, Any]:
    clients: dict[str, Any] = {}
    for client, runs in seen.items():
        clients[client] = {}
        for way in ("produce", "consume"):
            cpu = [run[f"{way}_cpu_us"] for run in runs]
            clients[client][way] = {
                "records_per_s": statistics.median(run[f"{way}_per_s"] for run in runs),
                "cpu_us": statistics.median(cpu),
                "cpu_us_low": min(cpu),
                "cpu_us_high": max(cpu),
            }
    ratio = {
        way: clients["draftloop"][way]["cpu_us"] / clients["confluent"][way]["cpu_us"] for way in ("produce", "consume")
    }
    return {
        "records": records,
        "record_bytes": record_bytes,
        "rounds": rounds,
        "clients": clients,
        "cpu_ratio": ratio,
    }


def _payloads(record_bytes: int) -> list[tuple[bytes, bytes]]:
    """Keys and values that compression cannot shrink, made before the clock starts."""
    source = random.Random(7)
    return [(f"conversation-{number}".encode(), source.randbytes(record_bytes)) for number in range(POOL)]


class _Clock:
    """Wall and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), self._spent()

    def per_record(self, way: str, records: int) -> dict[str, float]:
        wall, cpu = time.monotonic() - self._wall, self._spent() - self._cpu
        return {f"{way}_per_s": records / wall, f"{way}_cpu_us": cpu / records * 1e6}

    @staticmethod
    def _spent() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def _run_ours(config: KafkaConfig, topic: str, records: int, payloads: list[tuple[bytes, bytes]]) -> dict[str, float]:
    log = KafkaLog(config)
    log.append(topic, [LogEntry(*payloads[0])])  # connected before the clock starts, on both sides
    clock = _Clock()
    for first in range(0, records, BATCH):
        log.append(topic, [LogEntry(*payloads[n % POOL]) for n in range(first, min(first + BATCH, records))])
    result = clock.per_record("produce", records)
    ends = log.end_offsets(topic)
    clock = _Clock()
    found = sum(1 for number, end in ends.items() for _ in log.read(topic, number, 0, end))
    result |= clock.per_record("consume", found)
    log.close()
    return _complete(result, found, records + 1)


def _run_confluent(
    config: KafkaConfig, topic: str, records: int, payloads: list[tuple[bytes, bytes]]
) -> dict[str, float]:
    import confluent_kafka

    options = _confluent_options(config)
    producer = confluent_kafka.Producer(
        {
            **options,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": LINGER_MS,
            "compression.type": config.compression,
        }
    )
    failed: list[object] = []

    def told(error: object, message: object) -> None:
        if error is not None:
            failed.append(error)

    producer.produce(topic, key=payloads[0][0], value=payloads[0][1], on_delivery=told)
    producer.flush(30)
    clock = _Clock()
    for number in range(records):
        key, value = payloads[number % POOL]
        while True:
            try:
                producer.produce(topic, key=key, value=value, on_delivery=told)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    producer.flush(120)
    result = clock.per_record("produce", records)
    if failed:
        raise BrokerError(f"confluent-kafka could not deliver {len(failed)} of {records} records: {failed[0]}")
    consumer = confluent_kafka.Consumer(
        {**options, "group.id": "draftloop.bench", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(NUM_PARTITIONS)])
    clock = _Clock()
    found = sum(1 for _ in _confluent_read(consumer, records + 1))
    result |= clock.per_record("consume", found)
    consumer.close()
    return _complete(result, found, records + 1)


def _confluent_read(consumer: Any, wanted: int) -> Iterator[bytes]:
    idle = time.monotonic() + 30
    while wanted > 0 and time.monotonic() < idle:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                wanted -= 1
                idle = time.monotonic() + 30
                yield message.value()


def _confluent_options(config: KafkaConfig) -> dict[str, str]:
    security = config.required()
    if security.protocol not in ("SASL_SSL", "SASL_PLAINTEXT") or security.mechanism == "OAUTHBEARER":
        raise ConfigError("bench log compares clients over SCRAM", mend="give a client that logs in with SCRAM")
    return {
        "bootstrap.servers": ",".join(config.bootstrap),
        "security.protocol": security.protocol,
        "sasl.mechanisms": security.mechanism,
        "sasl.username": security.username or "",
        "sasl.password": security.password(),
        **({"ssl.ca.location": str(security.ca_file)} if security.ca_file else {}),
    }


def _complete(result: dict[str, float], found: int, wanted: int) -> dict[str, float]:
    if found != wanted:
        raise BrokerError(f"{found} of {wanted} records were read back", mend="check the broker's log")
    return result


def main() -> None:
    """One measurement in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", choices=CLIENTS, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--record-bytes", type=int, required=True)
    given = parser.parse_args()
    run = _run_ours if given.client == "draftloop" else _run_confluent
    print(json.dumps(run(read_client(given.file), given.topic, given.records, _payloads(given.record_bytes))))


if __name__ == "__main__":
    main()
