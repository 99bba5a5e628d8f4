"""Report: what a run says of itself: header, log, metrics.jsonl, trackers, Prometheus, profile, summary and page."""
