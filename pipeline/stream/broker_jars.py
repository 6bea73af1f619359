"""Where Kafka's jars are, and Maven to fetch them. draftloop ships none."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from draftloop.pipeline.errors import KafkaJarsNotFoundError

JARS_VARIABLE = "DRAFTLOOP_KAFKA_LIBS"
POM = Path(__file__).with_name("pom.xml")
MIN_KAFKA_MAJOR = 4
FETCH_TIMEOUT_S = 900.0
TOLD_CHARS = 700
OWN_JARS = (
    f"point --libs DIR or ${JARS_VARIABLE} at a folder of Kafka {MIN_KAFKA_MAJOR}.x jars, or $KAFKA_HOME at an unpacked"
    " Apache Kafka (its libs/ is used)"
)
WAYS = f"{OWN_JARS}, or let Maven fetch them: `draftloop broker fetch --libs DIR`"


def find_libs(libs: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder with Kafka's jars: `libs`, $DRAFTLOOP_KAFKA_LIBS or $KAFKA_HOME/libs, the first that is given.

    Raises KafkaJarsNotFoundError where none is given, or where the one given holds no Kafka that is new enough.
    """
    given = [("--libs", libs)] if libs is not None else []
    if environ.get(JARS_VARIABLE):
        given.append((f"${JARS_VARIABLE}", Path(environ[JARS_VARIABLE])))
    if environ.get("KAFKA_HOME"):
        given.append(("$KAFKA_HOME", Path(environ["KAFKA_HOME"]) / "libs"))
    if not given:
        raise KafkaJarsNotFoundError("no folder with Kafka's jars was given", mend=WAYS)
    name, folder = given[0]
    version = _kafka_version(folder)
    if version is None:
        raise KafkaJarsNotFoundError(f"{name}: {folder} holds no Kafka (kafka_2.13-*.jar, kafka-clients)", mend=WAYS)
    if int(version.split(".")[0]) < MIN_KAFKA_MAJOR:
        raise KafkaJarsNotFoundError(f"{name}: {folder} holds Kafka {version}, which is too old", mend=WAYS)
    if set(":*") & set(str(folder.resolve())):
        raise KafkaJarsNotFoundError(f"{name}: {folder}: Java's class path cannot hold ':' or '*'", mend="rename it")
    return folder.resolve()


def fetch(dest: Path) -> Path:
    """Fetch the jars into `dest` with Maven (about 44 MB, a minute). Raises KafkaJarsNotFoundError saying what else."""
    maven = shutil.which("mvn")
    if maven is None:
        raise KafkaJarsNotFoundError("Maven (`mvn`) is not on the path, so nothing was fetched", mend=OWN_JARS)
    dest = dest.resolve()
    with tempfile.TemporaryDirectory(prefix="draftloop-fetch-") as folder:
        # Maven leaves a target/ folder beside its pom, and an installed package may be read-only.
        pom = Path(shutil.copy(POM, folder))
        command = [maven, "-q", "-B", "-Dstyle.color=never", "-f", str(pom), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={dest}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KafkaJarsNotFoundError(f"{maven} did not finish: {type(error).__name__}", mend=OWN_JARS) from error
    if done.returncode:
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        told = next((line for line in said.splitlines() if line.strip()), "it said nothing")
        raise KafkaJarsNotFoundError(f"Maven ended with {done.returncode}: {told[:TOLD_CHARS]}", mend=OWN_JARS)
    return find_libs(dest, {})


def _kafka_version(folder: Path) -> str | None:
    if not any(folder.glob("kafka-clients-*.jar")):
        return None
    for jar in sorted(folder.glob("kafka_2.*.jar"), reverse=True):
        if found := re.fullmatch(r"kafka_2\.\d+-(\d+\.\d+[^-]*)\.jar", jar.name):
            return found[1]
    return None
