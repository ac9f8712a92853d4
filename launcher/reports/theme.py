"""Colors of all charts and pages, for light and for dark screens."""

from __future__ import annotations

# name -> (light, dark); lines and marks keep 3:1 against the card of their mode, text 4.5:1
PALETTE = {
    "blue": ("#1f6fb4", "#58a6e8"), "orange": ("#b85c0a", "#f0a050"), "green": ("#2a7f45", "#4fc878"),
    "red": ("#c0392b", "#ff7b72"), "purple": ("#7d4fb0", "#b992f0"), "teal": ("#0f7c88", "#3fc1cf"),
    "pink": ("#b83280", "#f08cc0"), "gray": ("#6b7280", "#9aa4b0"),
}
SURFACES = {
    "card": ("#ffffff", "#171c23"), "back": ("#f4f6f8", "#0e1217"), "ink": ("#1d232b", "#e6edf3"),
    "soft": ("#5b6470", "#9aa7b4"), "line": ("#dfe3e8", "#303740"),
}
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, PINK, GRAY = (light for light, _ in PALETTE.values())
CARD, _, INK, SOFT, LINE = (light for light, _ in SURFACES.values())
RUN_COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, PINK, GRAY)
# light color of a chart -> the property of the page that replaces it
VARIABLES = {light: f"var(--{name})" for name, (light, _) in {**PALETTE, **SURFACES}.items()}


def css() -> str:
    """The colors as properties of the page; paper is always light."""
    light, dark = ("; ".join(f"--{name}: {pair[mode]}" for name, pair in {**PALETTE, **SURFACES}.items())
                   for mode in (0, 1))
    return (f":root {{ color-scheme: light dark; {light} }}\n"
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n")


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors, 1 to 21, as defined by WCAG 2."""
    bright, dim = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[place:place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
