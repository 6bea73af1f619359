"""SCRAM users of a cluster, set over a connection that is already somebody's."""

from __future__ import annotations

from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient, UserScramCredentialUpsertion

from draftloop.pipeline.errors import BrokerError
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import client_options, translate

ITERATIONS = 8192


def set_scram_password(config: KafkaConfig, user: str, password: str) -> None:
    """Give a user a SCRAM-SHA-512 password, or another one; a login knows it a moment later. Raises BrokerError.

    The password is hashed here; neither it nor the hash is in any message.
    """
    wanted = UserScramCredentialUpsertion(user, "SCRAM-SHA-512", password, iterations=ITERATIONS)
    try:
        with KafkaAdminClient(**client_options(config)) as client:
            answers = client.alter_user_scram_credentials([wanted])
    except kafka_errors.KafkaError as error:
        raise translate(error, config, act="set the password of", resource=f"user {user!r}") from error
    if user not in answers or answers[user] is not None:
        raise BrokerError(f"Kafka refused a password for {user!r}: {answers.get(user)}", mend="see the broker's log")
