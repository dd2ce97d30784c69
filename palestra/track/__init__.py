"""What a run says while it runs: metrics, the sinks they go to, progress and traces."""
