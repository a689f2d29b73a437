"""Log two runs with MLflow to its file store."""

import os

from logged_values import LoggedValues, logged_values

PARAMETERS = {"lr": 0.05, "model/name": "tiny", "epochs": 6}


def main(logged: LoggedValues) -> None:
    # MLflow announces the end of the file store.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    mlflow.set_tracking_uri(logged.folder.as_uri())
    experiment = mlflow.create_experiment("tiny")
    for number in range(2):
        with mlflow.start_run(experiment_id=experiment) as active:
            run = f"{experiment}/{active.info.run_id}"
            mlflow.log_params(PARAMETERS)
            for step in range(6):
                values = {"train/loss": 1 / (step + 1 + number), "lr": 0.05}
                mlflow.log_metrics(values, step=step)
                logged.add(run, values, step)
        logged.add_parameters(run, PARAMETERS)


if __name__ == "__main__":
    with logged_values() as values:
        main(values)
