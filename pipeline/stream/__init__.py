"""The capture log and who may write what into it: log protocol, SQLite log, consent policy."""
