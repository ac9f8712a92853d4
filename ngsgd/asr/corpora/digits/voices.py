"""Accents and voices of the synthesizer, and their distribution over the sets.

A voice is an accent with a variant of espeak-ng, which changes the timbre. The sets share accents
but no variant, and variants of one name (steph, steph2) stay in one set. Whispering, robotic and
joke variants are excluded. Variants with the first or second formant outside 80-140 % of the
default, a larger difference than between human speakers, are in the training set only.
"""

from __future__ import annotations

ACCENTS = (
    "gmw/en-US", "gmw/en", "gmw/en-GB-scotland", "gmw/en-GB-x-rp", "gmw/en-GB-x-gbclan", "gmw/en-GB-x-gbcwmd",
    "gmw/en-029", "gmw/en-US-nyc",
)

VARIANTS = {
    "train": (
        "Alex", "Alicia", "Andrea", "Andy", "Denis", "Gene", "Gene2", "Henrique", "Jacky", "Lee", "Marco", "Mario", "Mike",
        "mike2", "Nguyen", "Reed", "RicishayMax", "RicishayMax2", "Storm", "antonio", "benjamin", "caleb", "david", "ed",
        "edward", "edward2", "f1", "f2", "f3", "grandma", "gustave", "iven", "iven2", "iven3", "iven4", "john", "kaukovalta",
        "klatt", "klatt2", "klatt3", "m1", "m3", "m6", "m7", "marcelo", "max", "michel", "norbert", "paul", "pedro",
        "robert", "sandro", "shelby", "steph", "steph2", "steph3", "travis", "victor", "zac",
    ),
    "valid": ("Hugo", "aunty", "boris", "f5", "m5", "m8", "miguel", "quincy"),
    "test": ("Annie", "Diogo", "Michael", "adam", "announcer", "belinda", "f4", "grandpa", "ian", "linda", "m2", "m4",
             "pablo", "rob"),
}
