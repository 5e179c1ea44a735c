"""bounded: as async, but a worker more than S steps ahead of the slowest one waits for it.

worker:  loop: pull w; g = gradient(w); push g
ps:      on push g: w = optimizer(w, g); steps[worker] += 1
         answer w once steps[worker] - min(steps) <= S
"""

from paceline.modes.each_push import EachPush


class Bounded(EachPush):
    keeps_clocks = True

    def may_read(self, ahead: int) -> bool:
        return ahead <= self.spec.staleness
