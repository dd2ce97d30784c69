"""Pages of several kinds of sites with known main content and boilerplate, and how well a text fits them."""

import re
from collections import Counter
from dataclasses import dataclass

NAV = """<header class="site-header"><div class="logo"><a href="/">The Example
Herald</a></div><nav class="main-nav"><ul>
<li><a href="/world">World</a></li><li><a href="/politics">Politics</a></li><li><a href="/culture">Culture</a></li>
<li><a href="/sport">Sport</a></li><li><a href="/login">Log in</a></li></ul></nav></header>"""
COOKIES = """<div id="cookie-banner" class="cookie-consent"><p>We and our partners use cookies to personalise
content, to
analyze our traffic and to show advertisements that fit you.</p><button>Accept all</button></div>"""
SIDEBAR = """<div class="sidebar"><h3>Most read</h3><ul><li><a href="/1">Seven recipes for a rainy Sunday</a></li>
<li><a href="/2">Why the night train is back</a></li><li><a href="/3">Quiz: how well do you know rivers?</a></li></ul>
<div class="newsletter"><h3>Newsletter</h3><p>Get our best stories in your inbox every morning.</p>
<form><input name="email"><button>Subscribe</button></form></div></div>"""
SHARE = """<div class="share-buttons"><a href="#">Share on Facebook</a> <a href="#">Tweet this</a></div>"""
FOOTER = """<footer class="footer"><p>© 2024 The Example Herald. All rights
reserved.</p><ul><li><a href="/terms">Terms of
service</a></li><li><a href="/privacy">Privacy policy</a></li><li><a href="/imprint">Imprint</a></li></ul></footer>"""


@dataclass(frozen=True)
class Sample:
    """A page and the HTML of its two parts."""

    html: str
    main: str
    boilerplate: str


def page(main: str, before: str, after: str, title: str) -> Sample:
    html = f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>{title}</title><style>p {{margin: 0}}</style>"
    html += f"<script>var page = '<p>tracking</p>';</script></head><body>{before}{main}{after}</body></html>"
    return Sample(html, main, before + after)


NEWS = """<article class="story"><h1>Harbour bridge opens after nine years</h1>
<p>The new bridge over the harbour opened on Saturday morning, nine years after the first pile was driven and
four years
later than planned. Thousands of people walked across it before the first cars were let on at noon.</p>
<p>“We waited so long that my children have learned to drive in the meantime,” said Marta Lind, who runs a
bakery on the
northern shore. The crossing saves her a detour of forty minutes each day.</p>
<h2>Costs doubled</h2><p>The city had put the price at 210 million in 2015. Poor ground, two bankrupt contractors and a
winter with ice in the bay brought it to 433 million, according to the report that the council published in May.</p>
<p>A toll of two pounds for cars will be collected from January on; cyclists and pedestrians cross for free.</p>
</article>"""
BLOG = """<main><article><h1>Sorting lists by more than one key</h1><p>Python's <code>sorted</code> is stable, so items
that compare equal keep their order. That makes sorting by several keys simple: sort by the last key first.</p>
<pre><code class="language-python">def by_team_then_age(people):
    people = sorted(people, key=lambda p: p.age)

    return sorted(people, key=lambda p: p.team)
</code></pre><p>A tuple as the key does the same in a single pass, which is usually faster, because the list is
walked only
once. The cost of building the tuples is small compared to that of the comparisons that it saves.</p>
<h2>When the directions differ</h2><p>With numbers one can negate a key. With texts this does not work, and two passes,
the second with <code>reverse=True</code>, are the easiest way out.</p></article></main>"""
DOCS = """<div class="document"><div class="body" role="main"><h1>Configuration</h1><p>All settings are read
from a file
named <code>app.toml</code> in the working directory. A setting given on the command line wins over one in the
file, and
both win over the defaults that are listed below.</p><table class="docutils"><thead><tr><th>Key</th><th>Default</th>
<th>Meaning</th></tr></thead><tbody><tr><td>port</td><td>8080</td><td>Where the server
listens</td></tr><tr><td>workers</td>
<td>4</td><td>How many processes answer requests</td></tr><tr><td>timeout</td><td>30</td><td>Seconds until a request is
given up</td></tr></tbody></table><h2>Reloading</h2><p>Send the signal HUP to the parent process to read the
file again.
Requests that are being answered are finished with the old settings; new ones get the new settings.</p>
<pre>kill -HUP $(cat app.pid)</pre></div></div>"""
RECIPE = """<div class="post-content"><h1>Lentil soup with lemon</h1><p>This soup is on the table in half an
hour and tastes
even better on the next day. Red lentils need no soaking, and they fall apart by themselves while they cook.</p>
<h2>Ingredients</h2><ul><li>250 g of red lentils, rinsed until the water stays clear</li><li>One large onion, chopped
finely</li><li>Two cloves of garlic and a piece of ginger</li><li>One litre of vegetable stock</li><li>Juice of a
lemon</li></ul><h2>Method</h2><ol><li>Soften the onion in oil over a low heat for ten minutes.</li><li>Add garlic and
ginger and stir for one minute more.</li><li>Pour in lentils and stock and simmer for fifteen
minutes.</li><li>Season with
lemon juice, salt and pepper.</li></ol></div>"""
WIKI = """<div id="mw-content-text"><p>The <b>little owl</b> is a bird that lives in much of the warmer parts of
<a href="/wiki/Europe">Europe</a>, Asia and North Africa. It belongs to the typical or true owls, the family Strigidae,
which contains most species of owl.</p><h2>Description</h2><p>The little owl is a small owl with a flat-topped head, a
plump, compact body and a short tail. The facial disc is flattened above the eyes, giving the bird a frowning
expression.</p><h2>Behavior</h2><p>This species is partly active by day and often perches boldly and
prominently during
the day. It bobs its head up and down when it is alarmed. Its flight is bounding, like that of a
woodpecker.</p></div>"""
QUESTION = """<div class="question"><h1>How do I undo the last commit?</h1><div class="post-text"><p>I
committed the wrong
files by accident, but I have not pushed the commit to the server yet. How can I undo it and keep my changes on
disk, so that
I can commit the right files instead?</p></div></div><div class="answer"><div class="post-text"><p>Reset the
branch to the
commit before, and leave the working tree alone; the changes stay on your disk and are no longer staged:</p>
<pre><code>git reset HEAD~1
git status
</code></pre><p>With <code>--soft</code> they stay in the index as well, so that you can commit them again at
once. Beware of
<code>--hard</code>, which throws away all that you changed.</p></div></div>"""
OLD_TABLES = """<h1>My trip to the Dolomites</h1><p>In the summer of 1998 we set out by train, with two
rucksacks and a tent
that leaked. The first night we slept at a farm above the valley, where the farmer's wife gave us milk and bread.<p>On
the second day we climbed to the hut below the Three Peaks. The path is easy but long, and thunder was rolling
behind the
ridge all afternoon.<p>We stayed for a week and came home brown, hungry and very happy. I would go again tomorrow."""
GERMAN = """<article><h1>Warum Brücken singen</h1><p>Wenn der Wind aus Westen weht, beginnt die alte Hängebrücke am
Stadtrand zu summen. Anwohner haben sich daran gewöhnt, Besucher bleiben verwundert stehen und suchen nach
Lautsprechern.
</p><p>Verantwortlich sind Wirbel, die sich hinter den Seilen abwechselnd auf beiden Seiten ablösen. Treffen sie die
Eigenfrequenz des Seils, so schwingt es hörbar mit, wie die Saite eines Cellos unter dem
Bogen.</p><p>Gefährlich sei das
nicht, sagt die Ingenieurin Petra Voss, die das Bauwerk seit zwanzig Jahren prüft. Dämpfer hielten die
Ausschläge klein.
</p></article>"""
JAPANESE = """<div class="entry-content"><h1>雨の日の図書館</h1><p>雨の日の図書館は、いつもより静かです。
窓ぎわの席に座ると、
屋根をたたく雨の音と、本のページをめくる音だけが聞こえます。
子どもたちは絵本の棚の前に座りこみ、時間を忘れて読んでいます。</p>
<p>この図書館は百年前に建てられました。古い階段はきしみますが、職員のみなさんは毎朝ていねいに床をみがいています。
夏には庭の木かげで朗読会が開かれ、町じゅうから人が集まります。</p></div>"""
PRODUCT = """<div class="product"><h1>Steel water bottle, 750 ml</h1><div class="description"><p>A double wall
of stainless
steel keeps drinks cold for a day and hot for twelve hours. The wide mouth takes ice cubes and is easy to
clean, and the lid
closes tightly even after years of use.</p><h2>Details</h2><ul><li>Holds 750 ml and weighs 380 g</li><li>Free of BPA,
the coating is safe for dishwashers</li><li>Fits the cup holders of most bicycles and cars</li></ul><p>If the bottle
leaks within ten years of the purchase we replace it, without any questions and at our own cost.</p></div></div>"""

COLUMNS = '<table width="100%"><tr><td width="20%"><font size="1"><a href="i.html">Home</a>\
<br><a href="p.html">Pictures</a>\
<br><a href="g.html">Guestbook</a></font></td><td>'
PAGES = {
    "news": page(NEWS, NAV + COOKIES, SHARE + SIDEBAR + FOOTER, "Harbour bridge opens"),
    "blog": page(BLOG, NAV, SHARE + SIDEBAR.replace("div class", "aside class", 1) + FOOTER, "Sorting lists"),
    "docs": page(DOCS, NAV + SIDEBAR, FOOTER, "Configuration"),
    "recipe": page(RECIPE, COOKIES + NAV, SHARE + SIDEBAR + FOOTER, "Lentil soup"),
    "wiki": page(WIKI, NAV, FOOTER, "Little owl"),
    "question": page(QUESTION, NAV + COOKIES, SIDEBAR + FOOTER, "Undo"),
    "old tables": page(OLD_TABLES, COLUMNS, "</td></tr></table>", "Trip"),
    "German": page(GERMAN, NAV + COOKIES, SIDEBAR + SHARE + FOOTER, "Brücken"),
    "Japanese": page(JAPANESE, NAV, SIDEBAR + FOOTER, "図書館"),
    "product": page(PRODUCT, COOKIES + NAV, SIDEBAR + FOOTER, "Bottle"),
}


def words(html: str) -> Counter[str]:
    """Words of HTML or Markdown, without tags and addresses; characters where words are not parted by blanks."""
    text = re.sub(r"<(script|style).*?</\1>|<[^>]*>|\]\([^)]*\)", " ", html, flags=re.DOTALL)
    return Counter(re.findall(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+", text))


def fit(markdown: str, sample: Sample) -> tuple[float, float]:
    """The F1 of the words of the main content, and the share of the boilerplate's words that were kept."""
    found, main = words(markdown), words(sample.main)
    right = (found & main).total()
    boilerplate = words(sample.boilerplate) - main
    f1 = 2 * right / (found.total() + main.total())
    return f1, (found & boilerplate).total() / max(boilerplate.total(), 1)
