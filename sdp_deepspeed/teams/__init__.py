"""Teams: jobs of their own that meet every H steps, and come and go.

A run has K teams with numbers 0 to K - 1, each of which trains one subnetwork: that of worker k in the plan of K
workers, which never changes. A team is an ordinary job of any host, in a world of torch.distributed of its own: `join`
reduces the model to the team's subnetwork before the host sees it. Between meetings nothing leaves a team.

A **meeting** after every H-th optimizer step averages the teams. For every element with present holders S and anchor a
(fp32): `delta = a - mean over S of w`, then a step of torch's SGD (`outer_lr`, `outer_momentum`, Nesterov;
`outer_step.py`) on a, and all of S set their weights to a. An **anchor** is a weight after the last meeting, the
**version** of a team the number of meetings that counted. At C = 1 this is DiLoCo (arXiv 2311.08105).

One meeting, in the order of the code (`participant.py`, `_take_part`):

1. Each rank of a team computes the difference from the anchors of its share of every tensor that the team holds
   (`shares.py`, `weights.py`). If one is not finite, this team ends.
2. Rank 0 asks torchft's lighthouse who is here (`meeting_point.py`). The answer has facts of every team: number,
   version, call, and what must be equal (plan, settings, package, number of ranks). From these all ranks of all teams
   compute the same decision (`attendance.py`): who takes part, who has the newest anchors, who lacks them, and whether
   to wait, since some unit has no current holder.
3. Ranks r of all teams exchange their shares (`exchange.py`): two all-to-alls for the mean, in which a holder sends
   only what the receiver holds, and a third that copies anchors and momentum to teams without state and to those that
   missed a meeting.
4. The meeting counts if every rank of every team has finished its exchange: the first one that knows this, or that it
   is not so, decides by an atomic write to a store. A meeting that does not count changes nothing, and is repeated
   with the teams that are still here.

A team that is killed closes its connections, and is absent once the lighthouse has missed its heartbeats: the others
stand still for that long, and for the exchange that they repeat. They lose no local step. The team that is started
again, without any state, waits in `start` for the next meeting, and copies anchors and momentum from the first current
holder of each unit. If all holders of a unit have come back with older anchors, the newest of these are current.

Assumptions: the machine of the lighthouse is reachable from all teams, and each team from all others. If the first
team present, which has the store, is killed within the milliseconds of a decision, some teams may count a meeting that
others repeat; those others then take over the anchors at the next one, and lose the steps since the last.

The package does not import DeepSpeed.
"""
