"""The choices and checks behind the form that starts a run."""
