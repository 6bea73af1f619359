"""Candidates and champions: the registry protocol, its in-memory twin, MLflow, and the drafter's passport."""
