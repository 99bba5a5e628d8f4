"""Job: the processes of a run: start, rendezvous, printing, run folder, heartbeats, signals and exit.

job.begin(settings)                            signals and threads, before torch is imported
with job.World(settings, advice) as world:     an exception inside becomes one line and an exit code
    device = world.meet()                      rendezvous; this rank's device
    folder = job.take_folder(settings)         the run's folder, locked
    job.check_machine(settings, mesh, device)
    job.enter_phase("forward")                 recorded in the heartbeats, named when the job stalls
    job.due(settings, step, first_step).save   True if a checkpoint is due
    world.exit_code = 0

Each name has a docstring in its file.
"""

from harness.job.endings import STOPPED, at_exit, describe_exit
from harness.job.folders import replace_file, take_folder
from harness.job.heartbeats import PROGRESS, end_save_stage, enter_phase
from harness.job.preflight import check_disk, check_machine, check_world
from harness.job.schedule import Actions, count_steps, due
from harness.job.signals import Stopped, StopRequest, ignore_signals
from harness.job.startup import begin, set_allocator
from harness.job.terminal import (
    columns,
    command,
    is_first_rank,
    is_terminal,
    last_lines,
    launcher,
    layer_progress,
    print0,
    print_error,
    step_bar,
    warn,
)
from harness.job.world import World, lift_group_timeouts, new_gloo_group, start_processes, stop_processes
