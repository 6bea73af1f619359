"""What an ACL of Kafka allows, as a pure function; the cells of the access matrix and what each should show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from draftloop.pipeline.errors import AccessSurpriseError
from draftloop.pipeline.stream.access_words import PLACEHOLDERS, Commands, counted

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


class Finding(NamedTuple):
    """A surprise that no cell shows by itself, or that is behind all cells of a principal."""

    kind: Literal["login", "extra_acl", "denying_acl", "extra_user", "drift"]
    what: str
    mend: str
    principal: str = ""  # of a login: whose cells it stands for


class Matrix(NamedTuple):
    """Every cell that was tried, what nobody's try shows, and the cells of those the access file does not know."""

    cells: tuple[Cell, ...]
    findings: tuple[Finding, ...] = ()
    foreign: tuple[Cell, ...] = ()  # what extra ACLs allow to principals we cannot log in as: not tried, read
    extra_topics: tuple[str, ...] = ()  # told and no surprise: they give nobody anything
    commands: Commands = PLACEHOLDERS

    @property
    def surprises(self) -> tuple[Cell | Finding, ...]:
        """Findings, then cells; those of a principal that cannot log in are one finding."""
        shut_out = {found.principal for found in self.findings if found.kind == "login"}
        wrong = (cell for cell in self.cells if cell.observed != cell.expected and cell.principal not in shut_out)
        return (*self.findings, *wrong)

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "cells": [cell._asdict() for cell in (*self.cells, *self.foreign)],
            "surprises": [
                {"kind": "cell", **one._asdict()}
                if isinstance(one, Cell)
                else {"kind": one.kind, "what": one.what, "mend": one.mend}
                for one in self.surprises
            ],
            "extra_topics": list(self.extra_topics),
        }

    def text(self) -> str:
        """Per principal and resource the operations that were allowed; then every surprise."""
        lines: list[str] = []
        shut_out = {found.principal for found in self.findings if found.kind == "login"}
        for principal in dict.fromkeys(cell.principal for cell in self.cells):
            own = [cell for cell in self.cells if cell.principal == principal]
            if principal in shut_out:
                lines.append(f"{principal}: cannot log in, nothing tried")
                continue
            lines.append(f"{principal}: {counted(len(own), 'act')} tried")
            for topic in dict.fromkeys(cell.topic for cell in own):
                allowed = [cell.operation for cell in own if cell.topic == topic and cell.observed == "allowed"]
                lines.append(f"  {topic}: {', '.join(allowed) or 'nothing'}")
        lines += [f"note: extra topic {name}, which the access file does not know" for name in self.extra_topics]
        lines += [f"SURPRISE {told(one)}" for one in self.surprises]
        lines.append(f"{counted(len(self.cells), 'cell')} tried, {counted(len(self.surprises), 'surprise')}")
        return "\n".join(lines)

    @property
    def mends(self) -> list[str]:
        """What to do about the surprises, without repeats."""
        found = [one.mend for one in self.surprises if isinstance(one, Finding)]
        if any(isinstance(one, Cell) for one in self.surprises):
            found.append(
                f"{self.commands.line('plan')} shows what differs, {self.commands.line('apply')} adds what is missing"
            )
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Raise AccessSurpriseError naming what the broker has or does that is not as the access file says."""
        wrong = self.surprises
        if not wrong:
            return
        named = "".join(f"\n  {told(one)}" for one in wrong[:MAX_NAMED])
        rest = f"\n  and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise AccessSurpriseError(
            f"the cluster is not as the access file says, {counted(len(wrong), 'surprise')}:{named}{rest}",
            mend="\n        ".join(self.mends[:MAX_NAMED]),
        )


def told(surprise: Cell | Finding) -> str:
    """A surprise in a line."""
    return surprise.text() if isinstance(surprise, Cell) else surprise.what


def foreign_cells(acls: Iterable[Acl], probes: Sequence[Probe]) -> tuple[Cell, ...]:
    """What ACLs of principals outside the access file allow them, a cell each; expected is "denied"."""
    cells: list[Cell] = []
    for acl in acls:
        name = acl.principal.removeprefix("User:")
        allowed = [Cell(name, p.operation, p.shown, "denied", "allowed") for p in probes if allows((acl,), name, *p)]
        where = {"topic": acl.name, "cluster": "cluster"}.get(acl.resource, f"{acl.resource}:{acl.name}")
        shown = where + ("*" if acl.pattern == "prefixed" else "")
        cells += allowed or [Cell(name, acl.operation, shown, "denied", "allowed")]
    return tuple(dict.fromkeys(cells))


def expected_cells(
    acls: Sequence[Acl], principals: Iterable[str], probes: Sequence[Probe]
) -> list[tuple[str, Probe, str]]:
    """(principal, act, "allowed" | "denied") for every pair."""
    return [
        (principal, probe, "allowed" if allows(acls, principal, *probe) else "denied")
        for principal in principals
        for probe in probes
    ]
