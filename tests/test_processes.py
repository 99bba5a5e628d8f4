"""Joining and leaving the world; what a rank says when it fails, and what a signal does to it."""

from harness import processes


def test_a_rank_waits_for_the_others_before_it_leaves(monkeypatch):
    """A gloo rank that leaves while others still talk to it aborts them, but only now and then."""
    called = []
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(processes.dist, name, lambda name=name: called.append(name))
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)
    processes.stop_processes()
    assert called == ["barrier", "destroy_process_group"]
