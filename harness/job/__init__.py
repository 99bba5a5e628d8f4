"""Job: the processes of a run: how they start, meet, print, share a folder, keep watch over each other and end.

settings = job.begin()                         flags, signals, threads; before torch is loaded
with job.World(settings) as world:             what is raised inside becomes one line and an exit code
    device = world.meet()
    folder = job.take_folder(settings)         the run's own, locked
    settings = job.check_machine(settings, ...)
    job.enter_phase("forward")                 where this rank is, for the line about a stall
    job.due(settings, step, first_step).save
    world.exit_code = 0

Each name of the list has a docstring in its file.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        # a process and its world
        "begin": "startup",
        "World": "world",
        "start_processes": "world",  # a world without flags, for programs other than the script
        "stop_processes": "world",
        "limit_waiting": "world",
        "ignore_signals": "signals",
        "LISTENING": "signals",  # for the drills of faults
        "at_exit": "endings",
        "state_of": "endings",
        "STOPPED": "endings",
        # where a rank is
        "enter_phase": "heartbeats",
        "writing": "heartbeats",
        "rank_name": "heartbeats",
        "HERE": "heartbeats",
        "RANKS": "heartbeats",
        # before the first step, and at each
        "take_folder": "folders",
        "replace_file": "folders",
        "check_machine": "preflight",
        "ParameterBytes": "preflight",
        "count_steps": "schedule",
        "due": "schedule",
        "Due": "schedule",
        # what is printed
        "say": "terminal",
        "say_story": "terminal",
        "print_error": "terminal",
        "columns": "terminal",
        "wrap_lines": "terminal",
        "width": "terminal",
        "is_terminal": "terminal",
        "is_first_rank": "terminal",
        "progress": "terminal",
        "step_bar": "terminal",
        "launcher": "terminal",
        "command": "terminal",
    },
)
