"""What an ACL of Kafka allows, as a pure function; the cells of the access matrix and what each should show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from draftloop.pipeline.errors import AccessSurpriseError

Resource = Literal["topic", "group", "cluster"]
Pattern = Literal["literal", "prefixed"]

TOPIC_OPERATIONS = ("READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
GROUP_OPERATIONS = ("READ", "DELETE", "DESCRIBE")
CLUSTER_OPERATIONS = ("ALTER", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
CLUSTER_NAME = "kafka-cluster"  # Kafka's own name of the one resource of that type
ANYONE = "User:*"
MAX_NAMED = 12  # surprises named in an error's message; the rest is counted

# Kafka lets these stand for the operation on the left.
_IMPLIED_BY = {
    "DESCRIBE": {"READ", "WRITE", "DELETE", "ALTER"},
    "DESCRIBE_CONFIGS": {"ALTER_CONFIGS"},
}


class Acl(NamedTuple):
    """One rule of the cluster, in Kafka's words. `resource` and `pattern` may be words we never write ourselves."""

    principal: str  # with its type: User:NAME
    permission: str  # ALLOW or DENY
    operation: str
    resource: str
    name: str
    pattern: str
    host: str = "*"

    def text(self) -> str:
        """How the rule is told to people."""
        where = "cluster" if self.resource == "cluster" else f"{self.resource} {self.name}"
        prefix = "*" if self.pattern == "prefixed" else ""
        host = "" if self.host == "*" else f" from {self.host}"
        return f"{self.permission.lower()} {self.principal} {self.operation} on {where}{prefix}{host}"

    def covers(self, resource: str, name: str) -> bool:
        """Whether the rule is about this resource."""
        if self.resource != resource:
            return False
        if self.pattern == "prefixed":
            return name.startswith(self.name)
        return self.name in (name, "*")


def allows(acls: Iterable[Acl], principal: str, operation: str, resource: str, name: str) -> bool:
    """Whether Kafka lets `User:principal` do it: deny wins, then any allow, otherwise no."""
    at_hand = [acl for acl in acls if acl.principal in (f"User:{principal}", ANYONE) and acl.covers(resource, name)]
    if any(acl.permission == "DENY" and acl.operation in (operation, "ALL") for acl in at_hand):
        return False
    enough = {operation, "ALL"} | _IMPLIED_BY.get(operation, set())
    return any(acl.permission == "ALLOW" and acl.operation in enough for acl in at_hand)


class Probe(NamedTuple):
    """One act to try: an operation on a resource."""

    operation: str
    resource: Resource
    name: str

    @property
    def shown(self) -> str:
        """The resource as the matrix names it."""
        return {"topic": self.name, "group": f"group:{self.name}", "cluster": "cluster"}[self.resource]


class Cell(NamedTuple):
    """An act of a principal: what the access file says and what the broker did."""

    principal: str
    operation: str
    topic: str  # a topic's name, "group:NAME" or "cluster"
    expected: str  # allowed | denied
    observed: str  # allowed | denied | error: CLASS

    def text(self) -> str:
        return f"{self.principal} {self.operation} {self.topic}: expected {self.expected}, observed {self.observed}"


class Matrix(NamedTuple):
    """Every cell that was tried."""

    cells: tuple[Cell, ...]

    @property
    def surprises(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.observed != cell.expected)

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "cells": [cell._asdict() for cell in self.cells],
            "surprises": [cell._asdict() for cell in self.surprises],
        }

    def text(self) -> str:
        """Per principal and resource the operations that were allowed; then every surprise."""
        lines: list[str] = []
        for principal in dict.fromkeys(cell.principal for cell in self.cells):
            own = [cell for cell in self.cells if cell.principal == principal]
            lines.append(f"{principal}: {len(own)} acts tried")
            for topic in dict.fromkeys(cell.topic for cell in own):
                allowed = [cell.operation for cell in own if cell.topic == topic and cell.observed == "allowed"]
                lines.append(f"  {topic}: {', '.join(allowed) or 'nothing'}")
        lines += [f"SURPRISE {cell.text()}" for cell in self.surprises]
        lines.append(f"{len(self.cells)} cells tried, {len(self.surprises)} surprises")
        return "\n".join(lines)

    def check(self) -> None:
        """Raise AccessSurpriseError naming the cells where the broker did something else than the access file says."""
        wrong = self.surprises
        if not wrong:
            return
        named = "; ".join(cell.text() for cell in wrong[:MAX_NAMED])
        rest = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise AccessSurpriseError(
            f"{len(wrong)} of {len(self.cells)} acts did not go as the access file says: {named}{rest}",
            mend="`draftloop access plan` shows what differs; `apply` adds what is missing, `apply --prune` removes"
            " extra ACLs",
        )


def expected_cells(
    acls: Sequence[Acl], principals: Iterable[str], probes: Sequence[Probe]
) -> list[tuple[str, Probe, str]]:
    """(principal, act, "allowed" | "denied") for every pair."""
    return [
        (principal, probe, "allowed" if allows(acls, principal, *probe) else "denied")
        for principal in principals
        for probe in probes
    ]
