"""Log two runs with MLflow to its file store, and two to its default store, a SQLite database."""

# Needs: mlflow-skinny sqlalchemy alembic
import os

from logged_values import LoggedValues

PARAMETERS = {"lr": 0.05, "model/name": "tiny", "epochs": 6}
NAMES = ("first", "second")


def main(logged: LoggedValues) -> None:
    # MLflow announces the end of the file store.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    mlflow.set_tracking_uri(logged.folder.as_uri())
    experiment = mlflow.create_experiment("tiny")
    log_runs(mlflow, logged, experiment, f"{experiment}/{{id}}")
    database = logged.folder / "mlflow.db"
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = mlflow.create_experiment("tiny", artifact_location=(logged.folder / "artifacts").as_uri())
    log_runs(mlflow, logged, experiment, f"{logged.folder.name}/{database.stem}/tiny/{{name}}")


def log_runs(mlflow, logged: LoggedValues, experiment: str, found_as: str) -> None:
    for number, name in enumerate(NAMES):
        with mlflow.start_run(experiment_id=experiment, run_name=name) as active:
            run = found_as.format(id=active.info.run_id, name=name)
            mlflow.log_params(PARAMETERS)
            for step in range(6):
                values = {"train/loss": 1 / (step + 1 + number), "lr": 0.05}
                mlflow.log_metrics(values, step=step)
                logged.add(run, values, step)
        logged.add_parameters(run, PARAMETERS)
