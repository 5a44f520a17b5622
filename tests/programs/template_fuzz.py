"""Attack all chat templates of the tests with many dialogs: `template_fuzz.py [STRINGS] [SEED]`.

Each dialog is checked against the oracle of `helpers.marked_fuzz`; the first prompt with a special
token that the template did not write ends the program.
"""

import itertools
import sys
import time

from helpers.chat_templates import TEMPLATES
from helpers.fine_tunes import KINDS
from helpers.marked_vocabularies import Target


def main() -> None:
    num_strings = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.monotonic()
    strings = checked = dialogs = 0
    targets = [Target(kind, name) for kind in KINDS for name in TEMPLATES]
    for round_number in itertools.count(seed):
        for target in targets:
            result = target.attack(seed=round_number, count=20)
            strings += result.strings
            dialogs += result.dialogs
            checked += result.checked
        if strings >= num_strings:
            break
    seconds = time.monotonic() - start
    print(f"{strings:,} strings in {dialogs:,} dialogs, {checked:,} of them checked: none wrong")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
