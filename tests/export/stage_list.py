"""An exporter of a user's own, in one file: the modules of each stage, one stage a line, for an engine of chains."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.export.base import AbstractExporter, Exported, ToExport
from gpp.export.degrees import ModuleChain
from gpp.export.layout import GivenLayout, LayoutPart
from gpp.settings import settings


@final
@settings("export")
class StageList(AbstractExporter):
    """Writes `stages.txt`, and reads it: a line that begins with `stage:` and names modules."""

    name: ClassVar[str] = "stage_list"
    engine: ClassVar[str] = "an engine of mine"
    whole: ClassVar[bool] = True
    nearest: bool = False

    def exported(self, e: ToExport) -> Exported:
        chain = ModuleChain.of(e, self.name)
        text = "".join(f"stage: {' '.join(part)}\n" for part in chain.parts)
        return Exported(files={"stages.txt": text}, command="mine stages.txt", ran=chain.ran)

    def layout(self, text: str) -> GivenLayout | None:
        if not text.startswith("stage:"):
            return None
        parts = tuple(LayoutPart(names=tuple(line.split()[1:])) for line in text.splitlines())
        return GivenLayout(source=self.name, text="stages.txt", parts=parts)
