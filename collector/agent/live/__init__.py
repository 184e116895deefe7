"""Output of the collector while the run goes on: metrics, verdicts, alerts, requests."""
