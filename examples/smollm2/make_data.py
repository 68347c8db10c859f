"""Makes the data sets in this folder. Deterministic; needs reasoning-gym (the extra `tasks`).

    python examples/smollm2/make_data.py [folder]

train.jsonl      chain_sum of reasoning-gym, with the options below
heldout.jsonl    1,000 different ones, none of which is in train.jsonl
untrained.jsonl  a task that is not trained: capitals of countries

Rows are told apart by what they ask. Another `seed` is not enough for that: item i of chain_sum is made from seed + i,
so sets with the seeds 0 and 1 share all but one item, and short sums repeat anyway.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from offbeat.data.gym import load_gym

OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
SEED = 20261201
GENERATED = 20000
HELD_OUT = 1000
TRAIN = 4000

CAPITALS = """Albania Tirana, Algeria Algiers, Angola Luanda, Argentina Buenos Aires, Armenia Yerevan, Australia
Canberra, Austria Vienna, Azerbaijan Baku, Bangladesh Dhaka, Belarus Minsk, Belgium Brussels,
Bolivia Sucre, Bulgaria Sofia, Cambodia Phnom Penh, Cameroon Yaounde, Canada Ottawa, Chile Santiago,
China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana, Cyprus Nicosia, Denmark Copenhagen,
Ecuador Quito, Egypt Cairo, Estonia Tallinn, Ethiopia Addis Ababa, Finland Helsinki, France Paris,
Georgia Tbilisi, Germany Berlin, Ghana Accra, Greece Athens, Haiti Port-au-Prince, Honduras
Tegucigalpa, Hungary Budapest, Iceland Reykjavik, India New Delhi, Indonesia Jakarta, Iran Tehran,
Iraq Baghdad, Ireland Dublin, Israel Jerusalem, Italy Rome, Jamaica Kingston, Japan Tokyo, Jordan
Amman, Kazakhstan Astana, Kenya Nairobi, Kuwait Kuwait City, Laos Vientiane, Latvia Riga, Lebanon
Beirut, Libya Tripoli, Lithuania Vilnius, Luxembourg Luxembourg, Madagascar Antananarivo, Malaysia
Kuala Lumpur, Mali Bamako, Malta Valletta, Mexico Mexico City, Mongolia Ulaanbaatar, Morocco Rabat,
Mozambique Maputo, Myanmar Naypyidaw, Nepal Kathmandu, Netherlands Amsterdam, Nicaragua Managua,
Nigeria Abuja, Norway Oslo, Oman Muscat, Pakistan Islamabad, Panama Panama City, Paraguay Asuncion,
Peru Lima, Philippines Manila, Poland Warsaw, Portugal Lisbon, Qatar Doha, Romania Bucharest, Russia
Moscow, Rwanda Kigali, Senegal Dakar, Serbia Belgrade, Singapore Singapore, Slovakia Bratislava,
Slovenia Ljubljana, Somalia Mogadishu, Spain Madrid, Sudan Khartoum, Sweden Stockholm, Switzerland
Bern, Syria Damascus, Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Uganda Kampala, Ukraine Kyiv,
Uruguay Montevideo, Venezuela Caracas, Vietnam Hanoi, Yemen Sana, Zambia Lusaka, Zimbabwe Harare"""


def sums() -> dict[str, list[dict[str, Any]]]:
    """Held-out rows have distinct expressions. Training rows come as the task makes them (half have terms of one digit,
    and of those there are only 200, so they repeat), without the held-out expressions.
    """
    rows: list[dict[str, Any]] = [
        {"question": entry["question"], "answer": entry["answer"], "expression": entry["metadata"]["expression"]}
        for entry in load_gym("chain_sum", {**OPTIONS, "seed": SEED, "size": GENERATED})
    ]
    distinct = sorted({row["expression"]: row for row in rows}.items())
    random.Random(SEED).shuffle(distinct)
    held_out = dict(distinct[:HELD_OUT])
    train = [row for row in rows if row["expression"] not in held_out]
    return {"heldout": list(held_out.values()), "train": train[:TRAIN]}


def capitals() -> list[dict[str, Any]]:
    """Without those where repeating the question would be an answer, such as Tunis."""
    pairs = [pair.split(maxsplit=1) for pair in CAPITALS.replace("\n", " ").split(", ")]
    return [
        {"question": f"What is the capital of {country}?", "answer": capital}
        for country, capital in pairs
        if capital.lower() not in country.lower() and country.lower() not in capital.lower()
    ]


def write(folder: Path) -> None:
    """Write all files of the example into `folder`."""
    for name, rows in {**sums(), "untrained": capitals()}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
