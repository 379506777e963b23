"""The agent's metrics: receives the records of its ranks, answers Prometheus, probes and `kdist status`."""

from kdist_trainer.exporter.exporter import SCRIPT, Exporter

__all__ = ["SCRIPT", "Exporter"]
