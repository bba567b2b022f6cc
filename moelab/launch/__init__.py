"""Starting ranks and hearing from them.

    with launch("package.module:function", job, ranks=4) as run:
        for rank, event in run:
            ...

`function(context, job)` then runs on four processes of this machine, started by torchrun;
`context.emit(event)` sends a dict to the loop above. worker.py says what a function finds, local.py what the
loop may rely on.
"""

from __future__ import annotations

from moelab.launch.failure import LaunchError, RankFailure
from moelab.launch.local import Launch, launch

__all__ = ["Launch", "LaunchError", "RankFailure", "launch"]
