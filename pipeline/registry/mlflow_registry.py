"""The registry on MLflow: a server, or a SQLite file and a folder on one machine.

Two registered models: `<name>-candidates`, which the trainer writes, and `<name>`, into which a reviewer copies and
whose alias `champion` names the live choice. The drafter folder and its signed verdict are artifacts of one MLflow
LoggedModel (`drafter/`, `review/verdict.json`); card, plots and tables lie under `review/` of the run.

MLflow is imported at the first call only. It has no compare-and-set: it is a register of decisions, not a lock.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, ConfigError, RegistryError, StorageError, VersionNotFoundError
from draftloop.pipeline.registry.registry import Candidate, Version

CHAMPION = "champion"
_JOB_KEY = "retrain.key"
_DIGEST = "draftloop.digest"
_BATCH = 100  # MLflow takes 100 parameters and 1000 metrics in one call
_INPUT_TAG_LIMIT = 500


class MlflowRegistry:
    """`Registry` on MLflow 3. Every method raises RegistryError where MLflow refuses or is not there."""

    def __init__(self, tracking_uri: str, name: str, artifact_root: Path | None = None) -> None:
        """tracking_uri: `sqlite:///path/mlflow.db` or a server. name: the registered model that serving follows.

        artifact_root: folder of the artifacts; None: beside the SQLite file, or where the server keeps them.
        Raises ConfigError for a name MLflow cannot hold.
        """
        if not name.strip() or any(sign in name for sign in "/:'\"`%"):
            raise ConfigError(
                f"registry name {name!r} cannot be a registered model's name in MLflow",
                mend="use letters, digits, '-', '_' and '.': no '/', ':' or quotes",
            )
        self._uri = tracking_uri
        self._name = name
        self._candidates = f"{name}-candidates"
        self._root = artifact_root if artifact_root is not None else _beside_database(tracking_uri)
        self._connected: Any = None
        self._facts: dict[str, tuple[str, str]] = {}  # run id -> job key, digest: written once, never changed

    def register(self, candidate: Candidate) -> Version:
        """Store a candidate; steps already done by an interrupted call are found and kept.

        Raises CheckpointError for a folder that is incomplete, altered or not the one `digest` names.
        """
        _require_sound(candidate)
        with _speaking(f"registering job {candidate.job_key}"):
            client = self._client()
            run = self._run(candidate.job_key) or self._new_run(candidate)
            version = self._version_of(run.info.run_id)
            if version is None:
                self._describe(run, candidate)
                model = self._store_drafter(run, candidate)
                self._ensure_model(self._candidates)
                version = client.create_model_version(
                    self._candidates,
                    source=model.artifact_location,  # "models:/<id>" would be sought at the process's default address
                    run_id=run.info.run_id,
                    model_id=model.model_id,
                    tags=dict(candidate.tags),
                    description=candidate.description,
                )
            if run.info.status != "FINISHED":
                client.set_terminated(run.info.run_id, "FINISHED")
            return self._read(version)

    def find(self, job_key: str) -> Version | None:
        """The candidate version of a job; None also where its registration was cut off."""
        with _speaking(f"looking for job {job_key}"):
            run = self._run(job_key)
            version = None if run is None else self._version_of(run.info.run_id)
            return None if version is None else self._read(version)

    def promote(self, candidate_version: str, *, by: str, reason: str) -> Version:
        """Copy a candidate into the champions and move the alias; a copy left by an interrupted call is used again.

        Raises VersionNotFoundError, RegistryError where the alias moved meanwhile.
        """
        with _speaking(f"promoting candidate {candidate_version} of {self._candidates}"):
            before = self._aliased()
            self._get(self._candidates, candidate_version)
            source = f"models:/{self._candidates}/{candidate_version}"
            copies = [version for version in self._all(self._name) if version.source == source]
            copy = copies[0] if copies else self._client().copy_model_version(source, self._name)
            return self._appoint(copy, before, by=by, reason=reason)

    def champion(self) -> Version | None:
        """The version the alias names. A missing model, alias or version is None: keep what is live."""
        with _speaking(f"reading the champion of {self._name}"):
            version = self._aliased()
            return None if version is None else self._read(self._get(self._name, version))

    def set_champion(self, version: str, *, by: str, reason: str) -> Version:
        """Move the alias to a champion version that exists. Raises VersionNotFoundError."""
        with _speaking(f"making version {version} the champion of {self._name}"):
            before = self._aliased()
            return self._appoint(self._get(self._name, version), before, by=by, reason=reason)

    def champions(self) -> list[Version]:
        """All champion versions, oldest first."""
        with _speaking(f"listing {self._name}"):
            return [self._read(version) for version in self._all(self._name)]

    def fetch(self, version: str, folder: Path) -> Path:
        """Download a champion's drafter folder to `folder`, whole or not at all.

        Raises VersionNotFoundError, CheckpointError.
        """
        with _speaking(f"fetching version {version} of {self._name}"), artifact.staging(folder) as draft:
            known = self._read(self._get(self._name, version))
            found = self._download(version, "drafter", draft)
            artifact.verify(found, kind="drafter", error=CheckpointError)
            if (found / artifact.MARKER).read_text().strip() != known.digest:
                raise CheckpointError(
                    f"version {version} of {self._name} holds another drafter than was registered",
                    mend="its artifacts were exchanged after review: promote it from its candidate again",
                )
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(found, folder)
        return folder

    def verdict(self, version: str) -> dict[str, Any]:
        """The signed verdict stored beside a champion's drafter. Raises VersionNotFoundError, CheckpointError."""
        with _speaking(f"reading the verdict of version {version} of {self._name}"):
            self._get(self._name, version)
            with tempfile.TemporaryDirectory() as folder:
                found = self._download(version, "review/verdict.json", Path(folder))
                try:
                    document = json.loads(found.read_bytes())
                except ValueError:
                    document = None
                if not isinstance(document, dict):
                    raise CheckpointError(
                        f"version {version} of {self._name}: its verdict is not a JSON object",
                        mend="promote the version again from its candidate, or roll back",
                    )
                return document

    # One step each.

    def _client(self) -> Any:
        """MLflow's client; the first call makes the database's tables where there are none."""
        if self._connected is None:
            client_class = _import_mlflow().MlflowClient
            database = _sqlite_path(self._uri)
            if database is not None and not database.exists():
                _make_database(client_class, database)
            self._connected = client_class(tracking_uri=self._uri, registry_uri=self._uri)
        return self._connected

    def _experiment(self, *, create: bool) -> str | None:
        found = self._client().get_experiment_by_name(self._name)
        if found is not None and found.lifecycle_stage == "active":
            return str(found.experiment_id)
        if found is not None:
            raise RegistryError(
                f"the MLflow experiment {self._name} was deleted", mend="restore it: `mlflow experiments restore`"
            )
        if not create:
            return None
        location = None if self._root is None else str(self._root.resolve() / self._name)
        return str(self._client().create_experiment(self._name, artifact_location=location))

    def _run(self, job_key: str) -> Any:
        experiment = self._experiment(create=False)
        if experiment is None:
            return None
        runs = self._client().search_runs(
            [experiment], filter_string=f"tags.`{_JOB_KEY}` = '{job_key}'", order_by=["attributes.start_time ASC"]
        )
        return runs[0] if runs else None

    def _new_run(self, candidate: Candidate) -> Any:
        tags = {_JOB_KEY: candidate.job_key, _DIGEST: candidate.digest}
        return self._client().create_run(
            self._experiment(create=True), tags=tags, run_name=f"{self._name} {candidate.job_key[:12]}"
        )

    def _version_of(self, run_id: str) -> Any:
        found = self._client().search_model_versions(f"name='{self._candidates}' and run_id='{run_id}'")
        return found[0] if found else None

    def _describe(self, run: Any, candidate: Candidate) -> None:
        """Parameters, metrics, lineage, the reviewer's files. Twice is harmless: times come from the steps."""
        from mlflow.entities import Metric, Param, RunTag

        client, run_id, start = self._client(), run.info.run_id, run.info.start_time
        params = [Param(key, str(value)) for key, value in candidate.params.items()]
        last = 0
        metrics = []
        for row in candidate.history:
            step = int(row.get("step", last))
            last = max(last, step)
            metrics += [Metric(key, value, start + step, step) for key, value in _finite(row) if key != "step"]
        metrics += [Metric(key, value, start + last, last) for key, value in _finite(candidate.metrics)]
        for at in range(0, max(len(params), len(metrics)), _BATCH):
            client.log_batch(run_id, metrics=metrics[at : at + _BATCH], params=params[at : at + _BATCH])
        client.log_inputs(run_id, [_lineage(candidate)])
        tables = [{"path": f"review/{name}", "type": "table"} for name in candidate.tables]
        client.log_batch(run_id, tags=[RunTag("mlflow.loggedArtifacts", json.dumps(tables))])
        with tempfile.TemporaryDirectory() as folder:
            _write_review(Path(folder), candidate)
            client.log_artifacts(run_id, folder, "review")

    def _store_drafter(self, run: Any, candidate: Candidate) -> Any:
        """The LoggedModel with drafter and verdict: the one already whole, or a new one."""
        client, run_id, experiment = self._client(), run.info.run_id, run.info.experiment_id
        for known in client.search_logged_models([experiment], filter_string=f"source_run_id='{run_id}'"):
            if str(known.status) == "READY" and known.tags.get("sha256") == candidate.digest:
                return known
            client.delete_logged_model(known.model_id)
        model = client.create_logged_model(
            experiment, name="drafter", source_run_id=run_id, tags={"sha256": candidate.digest}, model_type="drafter"
        )
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder)
            shutil.copytree(candidate.folder, whole / "drafter")
            artifact.write_json(whole / "review" / "verdict.json", dict(candidate.verdict))
            client.log_model_artifacts(model.model_id, folder)
        return client.finalize_logged_model(model.model_id, "READY")

    def _ensure_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client().create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _get(self, model: str, version: str) -> Any:
        found = _or_none(self._client().get_model_version, model, version) if version.isdecimal() else None
        if found is not None:
            return found
        raise VersionNotFoundError(f"{model} has no version {version}", mend="list them with `draftloop status`")

    def _all(self, model: str) -> list[Any]:
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._client().search_model_versions(f"name='{model}'", page_token=token)
            found += page
            token = page.token
            if not token:
                return sorted(found, key=lambda version: int(version.version))

    def _aliased(self) -> str | None:
        model = _or_none(self._client().get_registered_model, self._name)
        return str(model.aliases[CHAMPION]) if model is not None and CHAMPION in model.aliases else None

    def _appoint(self, version: Any, before: str | None, *, by: str, reason: str) -> Version:
        client, number = self._client(), str(version.version)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for key, value in {"review.by": by, "review.at": now, "review.reason": reason}.items():
            client.set_model_version_tag(self._name, number, key, value)
        found = self._aliased()
        if found != before:  # MLflow cannot compare and set: this narrows the window to one call
            raise RegistryError(
                f"the champion of {self._name} moved from {before} to {found} while {number} was being appointed",
                mend="look at the new champion, then decide again",
            )
        client.set_registered_model_alias(self._name, CHAMPION, number)
        return self._read(self._get(self._name, number))

    def _download(self, version: str, path: str, into: Path) -> Path:
        """By version, never by alias: a promotion meanwhile cannot change what is verified."""
        location = self._client().get_model_version_download_uri(self._name, version)
        download = _import_mlflow().artifacts.download_artifacts
        try:
            return Path(download(artifact_uri=f"{location}/{path}", dst_path=str(into), tracking_uri=self._uri))
        except OSError as error:
            raise RegistryError(
                f"version {version} of {self._name}: artifact {path} is gone: {error}",
                mend="register the drafter again",
            ) from error

    def _read(self, version: Any) -> Version:
        if version.run_id not in self._facts:
            tags = self._client().get_run(version.run_id).data.tags
            self._facts[version.run_id] = (tags.get(_JOB_KEY, ""), tags.get(_DIGEST, ""))
        job_key, digest = self._facts[version.run_id]
        return Version(str(version.version), job_key, digest, version.description or "", dict(version.tags))


def _import_mlflow() -> Any:
    """MLflow with its telemetry off (it would send usage to its makers), its log lines and progress bars silent."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # its documented and only switch; child processes inherit it
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    try:
        import mlflow
        from mlflow.telemetry.client import get_telemetry_client, set_telemetry_client
        from mlflow.utils.logging_utils import disable_logging
    except ImportError as error:
        raise ConfigError(f"MLflow is not installed: {error}", mend="pip install 'draftloop[mlflow]'") from error
    if get_telemetry_client() is not None:  # somebody imported MLflow before us
        set_telemetry_client()
    disable_logging()
    return mlflow


@contextmanager
def _speaking(what: str) -> Iterator[None]:
    """MLflow's refusals as RegistryError; its deprecation warnings are not our user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_mlflow()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError) as error:
            reason = str(error).strip().splitlines()[0]
            mend = "check the tracking address, your rights and the free disk space there"
            raise RegistryError(f"{what}: {reason}", mend=mend) from error
        except OSError as error:
            raise StorageError(f"{what}: {error}", mend="free disk space or fix the folder's rights") from error


def _or_none(call: Callable[..., Any], *arguments: str) -> Any:
    """What the call returns; None where MLflow says that the thing does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return call(*arguments)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _require_sound(candidate: Candidate) -> None:
    if not candidate.job_key or "'" in candidate.job_key:
        raise ConfigError(f"job key {candidate.job_key!r} is empty or holds a quote", mend="use a hex digest")
    if len(candidate.tags) > 5:
        raise ConfigError(
            f"a candidate has {len(candidate.tags)} tags, five fit the version page",
            mend="put the rest into the description",
        )
    for name in (*candidate.plots, *candidate.tables):
        if Path(name).name != name:
            raise ConfigError(f"review file {name!r} is not a plain file name", mend="give it without folders")
    artifact.verify(candidate.folder, kind="drafter", error=CheckpointError)
    found = (candidate.folder / artifact.MARKER).read_text().strip()
    if found != candidate.digest:
        raise CheckpointError(
            f"drafter {candidate.folder} has digest {found[:12]}, the candidate names {candidate.digest[:12]}",
            mend="register the folder that was judged",
        )


def _write_review(folder: Path, candidate: Candidate) -> None:
    (folder / "card.md").write_text(candidate.description)
    for name, picture in candidate.plots.items():
        (folder / name).write_bytes(picture)
    for name, columns in candidate.tables.items():  # the form of MLflow's log_table, which appends when repeated
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        (folder / name).write_text(json.dumps({"columns": list(columns), "data": rows}))


def _lineage(candidate: Candidate) -> Any:
    """The snapshot as a dataset of names and offsets: its content stays where consent and erasure rule."""
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import DatasetInput, InputTag

    source = {"snapshot": candidate.snapshot_id, **candidate.snapshot_source}
    digest = candidate.snapshot_id[:32]
    dataset = MetaDataset(CodeDatasetSource(tags=source), name=f"snapshot-{candidate.snapshot_id[:12]}", digest=digest)
    tags = [InputTag(key, value[:_INPUT_TAG_LIMIT]) for key, value in source.items()]
    return DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", "training"), *tags])


def _finite(row: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in row.items() if value is not None and math.isfinite(value)]


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None


def _make_database(client_class: Any, database: Path) -> None:
    """MLflow's tables, made beside and linked into place: it cannot go on with a migration that was cut off."""
    artifact.sweep(database.parent, of=database.name)
    with artifact.staging(database) as draft, suppress(FileExistsError):  # another process was first: that one counts
        fresh = draft / "new.db"
        client_class(tracking_uri=f"sqlite:///{fresh}", registry_uri=f"sqlite:///{fresh}")
        os.link(fresh, database)


def _beside_database(uri: str) -> Path | None:
    database = _sqlite_path(uri)
    return None if database is None else database.parent / "mlflow-artifacts"
