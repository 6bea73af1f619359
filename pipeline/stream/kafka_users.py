"""SCRAM users of a cluster, set over a connection that is already somebody's."""

from __future__ import annotations

from draftloop.pipeline.errors import BrokerError
from draftloop.pipeline.stream.kafka_config import KafkaConfig


def set_scram_password(config: KafkaConfig, user: str, password: str) -> None:
    """Give a user a SCRAM-SHA-512 password, or another one. Raises BrokerError and its children.

    The password is hashed here; neither it nor the hash is in any message.
    """
    from kafka.admin import KafkaAdminClient, UserScramCredentialUpsertion

    security = config.required()
    with KafkaAdminClient(
        bootstrap_servers=list(config.bootstrap),
        security_protocol=security.protocol,
        ssl_cafile=str(security.ca_file),
        ssl_certfile=str(security.cert_file),
        ssl_keyfile=str(security.key_file),
        bootstrap_timeout_ms=int(config.connect_timeout_s * 1000),
        request_timeout_ms=int(config.request_timeout_s * 1000),
    ) as client:
        wanted = UserScramCredentialUpsertion(user, "SCRAM-SHA-512", password)
        answers = client.alter_user_scram_credentials([wanted])
    if answers.get(user) is not None or user not in answers:
        raise BrokerError(f"Kafka refused a password for {user}: {answers.get(user)}", mend="look at the broker's log")
