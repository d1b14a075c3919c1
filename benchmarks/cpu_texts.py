"""Texts of many kinds, for measuring how near two computations of a model are: prose, code, chats, languages."""

from pathlib import Path

from infinilm import LLM

ROOT = Path(__file__).parents[1]

FILES = ("README.md", "docs/architecture.md", "LICENSE", "infinilm/checks.py", "infinilm/engine/scheduler.py")

STORY = """\
The lighthouse keeper had counted ships for thirty-one years, and in all that time she had never once been wrong. She
wrote each of them down in a grey book: the hour, the flag, the weather, and whether the crew had waved. On the last
evening of October a ship came out of the fog that had no flag at all. It moved without sound, its lamps were green
instead of white, and on its deck stood a single child who was reading. The keeper reached for her pen, hesitated, and
then, for the first time, drew a small question mark. "Tomorrow," she said to the cat, "we shall have to ask the
harbour master." But the cat, who had seen the ship before, only closed its eyes. In the morning the sea was as flat
as a table, the fog had gone, and in the book, beneath the question mark, somebody had written in green ink: Thursday.
"""

CHATS = (
    (
        "I have 3 apples and give away one third of them. How many are left?",
        "You start with 3 apples. One third of 3 is 1, so you give away 1 apple. 3 - 1 = 2. You have 2 apples left.",
        "And if I then buy a dozen more?",
        "A dozen is 12. 2 + 12 = 14, so you would have 14 apples.",
    ),
    (
        "Write a function in Python that says whether a word is a palindrome.",
        "def is_palindrome(word: str) -> bool:\n    letters = [c.lower() for c in word if c.isalpha()]\n"
        "    return letters == letters[::-1]\n\nIt ignores case and everything that is not a letter.",
    ),
    (
        "What should I pack for two days of hiking in the mountains in September?",
        "Bring layers: a light shirt, a warm sweater and a rain jacket. You will also want good boots, a map, two "
        "litres of water, some food, a torch, a small first-aid kit and a hat. Nights can be cold at that time.",
    ),
)

LANGUAGES = """\
Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung, aber im Bordrestaurant gibt es frischen Kaffee.
Hier, ma voisine a planté trois pommiers dans son jardin ; elle espère récolter ses premiers fruits dans quatre ans.
¿Sabes dónde está la biblioteca municipal? Quiero devolver dos libros de historia antes del próximo martes.
La domenica mattina mio nonno preparava il pane con la farina del mulino e raccontava storie del paese vecchio.
Amanhã de manhã vamos à praia, se não chover; depois almoçamos peixe grelhado com batatas e salada.
Завтра утром мы поедем на дачу, потому что яблоки уже созрели, а вечером вернёмся домой на электричке.
昨日は友達と一緒に山に登りました。頂上からの景色はとても美しかったです。
如果明天不下雨，我们就骑自行车去湖边，顺便买一些新鲜的水果。
Yarın sabah erkenden pazara gidip taze sebze ve peynir alacağım, sonra da annemi ziyaret edeceğim.
De kinderen speelden de hele middag in de tuin, totdat het begon te regenen en ze naar binnen moesten.
"""

TABLES = """\
SELECT city, COUNT(*) AS num_orders, ROUND(AVG(total), 2) AS mean_total
FROM orders JOIN customers ON customers.id = orders.customer_id
WHERE orders.created_at >= '2024-01-01' GROUP BY city HAVING COUNT(*) > 10 ORDER BY num_orders DESC;

{"id": 4711, "name": "Ada Example", "tags": ["early", "paid"], "address": {"street": "1 Main Street", "zip": "01234"}}

| month | rain (mm) | sun (h) |
|---|---|---|
| January | 62 | 51 |
| April | 40 | 162 |
| July | 78 | 217 |

#include <stdio.h>
int main(void) { for (int i = 1; i <= 10; i++) printf("%d squared is %d\\n", i, i * i); return 0; }
"""


def read_texts(engine: LLM, max_len: int) -> dict[str, list[int]]:
    """Each text's beginning of up to `max_len` token ids, by the text's name."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise SystemExit("the checkpoint has no tokenizer, so there is no text to read")
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
    texts |= {"story": STORY, "languages": LANGUAGES, "tables": TABLES}
    found = {name: tokenizer.encode(text) for name, text in texts.items()}
    if tokenizer.chat_template is not None:
        roles = ("user", "assistant")
        conversations = [
            [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(chat)] for chat in CHATS
        ]
        found["chats"] = [token for conversation in conversations for token in engine.chat_prompt(conversation)]
    return {name: token_ids[:max_len] for name, token_ids in found.items()}
