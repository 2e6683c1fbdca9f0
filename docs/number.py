"""Write the numbers of docs/report.md onto the picture of a report.

    python -m docs.number

The places are those of docs/report.png (1,280 pixels wide), which docs/photograph.py makes: a new picture needs new ones.
"""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from docs.draw import ROOT

PLACES = ((215, 163), (486, 172), (640, 122), (1230, 203), (12, 661), (12, 778), (1210, 661), (651, 832), (12, 895))
"""The middle of each number, in pixels."""
RADIUS = 13
GROUND, INK = "#b3261e", "#ffffff"


def main() -> None:
    """Write docs/report_numbered.png."""
    picture = Image.open(ROOT / "docs" / "report.png").convert("RGB")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(18)
    for number, (x, y) in enumerate(PLACES, 1):
        pen.ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=GROUND)
        pen.text((x, y), str(number), fill=INK, font=font, anchor="mm")
    picture.quantize(128).save(ROOT / "docs" / "report_numbered.png", optimize=True)


if __name__ == "__main__":
    main()
