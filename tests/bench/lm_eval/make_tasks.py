"""Writes the tasks' items beside it: seeded, so that everybody has the same.

python -m tests.bench.lm_eval.make_tasks
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NUM_CHOICES = 4
NUM_SUMS = 100
_CAPITALS = """
France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Ireland Dublin,
Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Iceland Reykjavik,
Poland Warsaw, Hungary Budapest, Romania Bucharest, Bulgaria Sofia, Greece Athens, Turkey Ankara,
Austria Vienna, Belgium Brussels, Croatia Zagreb, Serbia Belgrade, Slovenia Ljubljana,
Slovakia Bratislava, Ukraine Kyiv, Belarus Minsk, Lithuania Vilnius, Latvia Riga, Estonia Tallinn,
Moldova Chisinau, Albania Tirana, Russia Moscow, Georgia Tbilisi, Armenia Yerevan, Azerbaijan Baku,
Kazakhstan Astana, Uzbekistan Tashkent, Kyrgyzstan Bishkek, Tajikistan Dushanbe,
Turkmenistan Ashgabat, Mongolia Ulaanbaatar, China Beijing, Japan Tokyo, Vietnam Hanoi,
Thailand Bangkok, Cambodia Phnom_Penh, Laos Vientiane, Myanmar Naypyidaw, Malaysia Kuala_Lumpur,
Indonesia Jakarta, Philippines Manila, India New_Delhi, Pakistan Islamabad, Bangladesh Dhaka,
Nepal Kathmandu, Bhutan Thimphu, Afghanistan Kabul, Iran Tehran, Iraq Baghdad, Syria Damascus,
Lebanon Beirut, Jordan Amman, Oman Muscat, Yemen Sanaa, Qatar Doha, Bahrain Manama, Egypt Cairo,
Libya Tripoli, Tunisia Tunis, Algeria Algiers, Morocco Rabat, Sudan Khartoum, Ethiopia Addis_Ababa,
Eritrea Asmara, Somalia Mogadishu, Kenya Nairobi, Uganda Kampala, Rwanda Kigali, Burundi Gitega,
Tanzania Dodoma, Zambia Lusaka, Zimbabwe Harare, Malawi Lilongwe, Mozambique Maputo,
Botswana Gaborone, Namibia Windhoek, Angola Luanda, Madagascar Antananarivo, Nigeria Abuja,
Ghana Accra, Senegal Dakar, Mali Bamako, Niger Niamey, Chad N'Djamena, Gabon Libreville,
Canada Ottawa, Mexico Mexico_City, Cuba Havana, Jamaica Kingston, Peru Lima, Chile Santiago,
Colombia Bogota, Ecuador Quito, Bolivia Sucre, Paraguay Asuncion, Uruguay Montevideo,
Argentina Buenos_Aires, Brazil Brasilia, Venezuela Caracas, Australia Canberra, Fiji Suva
"""


def capitals(rng: random.Random) -> Iterable[dict[str, Any]]:
    """A country, its capital and three others': which is the likeliest?"""
    pairs = [pair.strip().replace("_", " ").split(" ", 1) for pair in _CAPITALS.split(",")]
    cities = [city for _, city in pairs]
    for country, city in pairs:
        choices = [city, *rng.sample([other for other in cities if other != city], NUM_CHOICES - 1)]
        rng.shuffle(choices)
        yield {"country": country, "choices": choices, "answer": choices.index(city)}


def sums(rng: random.Random) -> Iterable[dict[str, Any]]:
    """Two numbers, three examples before them: what does the model write?"""
    for _ in range(NUM_SUMS):
        numbers = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(4)]
        *examples, (left, right) = numbers
        shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in examples)
        yield {"question": f"{shown}{left} + {right} =", "answer": str(left + right)}


def main() -> None:
    for name, make in (("capitals", capitals), ("sums", sums)):
        lines = [json.dumps(item) for item in make(random.Random(name))]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
