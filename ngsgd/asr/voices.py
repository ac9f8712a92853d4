"""The synthesiser's accents and voices, and who is heard in which set.

A voice is an accent with one of espeak-ng's variants, which change the timbre.  The sets share accents but no variant,
and variants of one name (steph, steph2) stay in one set.  Whispering, robotic and joke variants are left out.
"""

from __future__ import annotations

ACCENTS = (
    "gmw/en-US", "gmw/en", "gmw/en-GB-scotland", "gmw/en-GB-x-rp", "gmw/en-GB-x-gbclan", "gmw/en-GB-x-gbcwmd",
    "gmw/en-029", "gmw/en-US-nyc",
)

VARIANTS = {
    "train": (
        "Alex", "Alicia", "Andrea", "Andy", "Denis", "Gene", "Gene2", "Henrique", "Jacky", "Lee", "Marco", "Mario", "Mike",
        "mike2", "Nguyen", "Reed", "RicishayMax", "RicishayMax2", "Storm", "announcer", "antonio", "benjamin", "caleb", "ed",
        "edward", "edward2", "f1", "f2", "f3", "grandma", "ian", "iven", "iven2", "iven3", "iven4", "john", "kaukovalta",
        "klatt", "klatt2", "klatt3", "m1", "m2", "m3", "m5", "m6", "m7", "max", "michel", "pablo", "paul", "pedro", "robert",
        "sandro", "shelby", "steph", "steph2", "steph3", "victor",
    ),
    "valid": ("Hugo", "aunty", "boris", "f5", "m8", "miguel", "quincy", "zac"),
    "test": ("Annie", "Diogo", "Michael", "adam", "belinda", "david", "f4", "grandpa", "gustave", "linda", "m4", "marcelo",
             "norbert", "rob", "travis"),
}
