"""Ways in which a watched job was misled or held up, once each."""

from __future__ import annotations

import os
import threading

import pytest

from mldebug import OverflowCallback, patch_transformers
from mldebug.core.errors import UsageError
from mldebug.numerics.distributed import _deadline

WARNS = """
import warnings

import torch
from torch import nn

from mldebug import DebugUnderflowOverflow

warnings.simplefilter("ignore")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = self.a(x)
        return self.b(torch.log(h - h.max()) if self.calls == 3 else h)


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


events = []
with DebugUnderflowOverflow(model := Model(), on_event=events.append) as recorder:
    recorder.quiet()
    train(model, 5)
print("events", [(event.step, event.phase) for event in events])

torch.compile(nn.Linear(8, 1), backend="eager")(torch.randn(4, 8))
for _ in range(3):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with DebugUnderflowOverflow(model := nn.Linear(8, 1)):
            train(model, 1)
    print("told", sum("compiled before" in str(warning.message) for warning in told))
compiled = torch.compile(model := nn.Linear(8, 1), backend="eager", fullgraph=True)
compiled(torch.randn(4, 8))
with warnings.catch_warnings(record=True) as told, DebugUnderflowOverflow(compiled) as recorder:
    warnings.simplefilter("always")
    train(compiled, 2)
print("anew", recorder.report.batches, recorder.report.ok)
"""


def test_what_follows_from_a_bad_forward_and_what_is_compiled(run_python):
    result = run_python(WARNS)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    # Neither the gradients of step 2 nor the weights that it spoils are said to come after a forward that was finite.
    assert lines[0] == "events [(2, 'forward'), (4, 'forward')]"
    # What was compiled is told of once, and not to each recorder that is made later in the process.
    assert lines[1:4] == ["told 1", "told 0", "told 0"]
    assert lines[4] == "anew 2 True"


@pytest.mark.parametrize("make", [OverflowCallback, patch_transformers])
def test_options_are_looked_at_when_they_are_given(make):
    with pytest.raises(UsageError, match="no option 'on_events'") as caught:
        make(on_events="warn")
    assert caught.value.hint == "did you mean on_event?"
    with pytest.raises(UsageError, match="on_event is 'explode'"):
        make(on_event="explode")
    with pytest.raises(UsageError, match="no option 'model'"):
        make(model=None)


JOIN = """
import datetime, os, sys, time, warnings

import torch
import torch.distributed as dist
from torch import nn

from mldebug import DebugUnderflowOverflow

warnings.simplefilter("ignore")
torch.set_num_threads(1)
children = []
for rank in (0, 1):
    if not (pid := os.fork()):
        break
    children.append(pid)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
dist.init_process_group("gloo", f"file://{os.path.abspath('store')}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=50))
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with DebugUnderflowOverflow(model, on_event="skip") as recorder, model.join():
    recorder.quiet()
    for step in range(2 + 3 * rank):
        x = torch.full((2, 4), float("inf") if step == 4 else 1.0)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report = recorder.report
ok = all(bool(p.isfinite().all()) for p in model.parameters())
sys.stdout.write(f"rank {rank} steps {report.steps} dropped {report.dropped_steps} finite {ok}\\n")
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)
"""


def test_ranks_that_have_run_out_of_batches_are_not_waited_for(run_python, tmp_path):
    """Its timeout of 50 s is shorter than the minute for which a rank would wait for a vote that does not come."""
    result = run_python(JOIN, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "rank 0 steps 2 dropped [] finite True",
        "rank 1 steps 5 dropped [4] finite True",
    ]


def test_two_callbacks_have_names_of_their_own():
    """Lightning refuses a Trainer with two callbacks of one name, at the start of fit()."""
    first, second = OverflowCallback(), OverflowCallback()
    assert first.state_key != second.state_key


def test_a_forked_rank_is_seen_to_wait():
    """Launchers of notebooks fork their ranks; Python 3.11 keeps the number of the parent's thread there."""
    pid = os.fork()
    if not pid:
        os._exit(0 if _deadline._native(threading.get_ident()) == threading.get_native_id() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
