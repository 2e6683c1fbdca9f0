from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.cost.stage import AbstractBill, StageCost
from gpp.stage import Stage
from tests.mechanisms.checksum.stage import Checksum


class Bill(AbstractBill):
    """Reading every gradient once, at the pace of an update, which reads and writes it."""

    def of(self, problem: Problem, stage: Stage, value: Checksum, bill: StageCost) -> StageCost:
        return replace(bill, own_s=(*bill.own_s, ("K", bill.update_s / 3.0)))


BILL = Bill()
