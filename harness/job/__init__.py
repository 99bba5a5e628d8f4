"""Job: the processes of a run: how they start, meet, print, share a folder, keep watch over each other and end.

settings = job.begin()                         flags, signals, threads; before torch is loaded
with job.World(settings) as world:             what is raised inside becomes one line and an exit code
    device = world.meet()
    folder = job.take_folder(settings)         the run's own, locked
    job.check_machine(settings, mesh, device)
    job.enter_phase("forward")                 where this rank is, for the line about a stall
    job.due(settings, step, first_step).save
    world.exit_code = 0

Each name of the list has a docstring in its file.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "startup": "begin",
        "world": "World start_processes stop_processes limit_waiting",
        "signals": "ignore_signals LISTENING Stopped",
        "endings": "at_exit state_of STOPPED",
        "heartbeats": "enter_phase end_part rank_name HERE RANKS",
        "folders": "take_folder replace_file",
        "preflight": "check_machine check_disk",
        "schedule": "count_steps due Due",
        "terminal": (
            "say say_story print_error warn columns is_terminal is_first_rank progress step_bar "
            "last_lines launcher command"
        ),
    },
)
