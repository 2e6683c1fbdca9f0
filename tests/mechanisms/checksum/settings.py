from dataclasses import replace
from typing import ClassVar

from gpp.cost.problem import Problem
from gpp.plan.choice import AbstractChoice
from gpp.plan.plan import Plan
from gpp.settings import settings
from tests.mechanisms.checksum.stage import Checksum


@settings("strategy.mechanisms")
class Checked(AbstractChoice):
    package: ClassVar[str] = "tests.mechanisms.checksum"

    def chosen(self, plan: Plan, problem: Problem) -> Plan:
        return replace(plan, stages=tuple(stage.having(Checksum(to=0)) for stage in plan.stages))
