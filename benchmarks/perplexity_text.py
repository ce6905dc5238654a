"""The fixed text on which perplexity is measured: prose of our own, of several kinds.

It must never change, or the figures of different days cannot be compared.
"""

TEXT = """\
The ferry leaves the old harbour at six, when the fish market is already half over. On the upper
deck there is a bench that faces backwards, and regular passengers know to take it, because the
wind comes from the bow and the town looks its best while it is getting smaller. First the cranes
disappear behind the breakwater, then the church, and at last only the chimney of the brickworks
is left, with its thin flag of smoke. The crossing takes fifty minutes. A woman in a green coat
sells coffee from an urn that is older than she is, and she knows who takes sugar.

My grandfather repaired clocks on the island for forty years. He used to say that a clock is never
wrong about the time; it is only right about some other place. When I was nine he gave me a box of
small brass wheels and told me to sort them by the number of their teeth. I counted for a week. I
found out afterwards that he had counted them all himself, and that the point had been to keep me
quiet while my parents argued about whether we should move to the mainland. We moved in the spring.
The wheels are in a drawer of my desk, still sorted.

How does a river choose its path? Water runs downhill, but a valley offers many ways down, and the
one that a river takes today is rarely the one it took a thousand years ago. On flat ground the
current is a little faster on the outside of every bend. It carries away sand from the outer bank
and drops it on the inner one, where the water is slow. So every bend grows, and the river swings
wider and wider across its plain, until two bends meet. Then the water breaks through the narrow
neck between them, takes the short way, and leaves behind a lake in the shape of a horseshoe. Seen
from the air, such a valley is a drawing with many lines, and only one of them is blue.

Bread needs four things: flour, water, salt and time. Yeast can be bought, but it is also in the
flour and in the air of every kitchen, and it only has to be invited. Mix equal weights of flour
and lukewarm water in a jar, cover it with a cloth, and leave it near the stove. On the second day
there will be a few bubbles. Throw away half of it and feed the rest with fresh flour and water.
After a week it rises within six hours and smells of apples. For a loaf, take one hundred grams of
this leaven, five hundred grams of strong flour, three hundred and fifty grams of water and ten
grams of salt. Fold the dough instead of kneading it: wet your hands, lift one side, and lay it
over the other. Do that four times, with half an hour of rest in between. Let the loaf stand in a
basket overnight in a cool place. Bake it in a closed iron pot, as hot as the oven will go, for
twenty-five minutes, and for another twenty without the lid. Do not cut it while it is hot.

The committee met on the third of March to discuss the state of the town's bridges. There are
eleven of them. The engineer reported that two were in good order, six needed new paint, and one,
the footbridge at the mill, should be closed at once. A member asked what had become of the other
two. The engineer answered that nobody had found them: they appeared in the register of 1904, with
their lengths and the names of their builders, but at the places named there was neither a bridge
nor a stream. After some debate it was agreed to keep them in the register, since removing them
would need a vote of the full council, and to paint the others in the order of their traffic. The
chairman thanked the engineer for his honesty. The next meeting was set for the first of April,
and then, at the request of the engineer, moved to the second.

A program that serves many people at once has to decide, again and again, whose turn it is. The
simplest rule is to take whoever came first. It is fair in the way a queue at a bakery is fair,
and it fails in the same way: one customer who orders forty cakes holds up everybody behind him.
Another rule is to give each person a small slice of attention in turn. Now the cakes take longer,
but the child who only wants a roll is served at once. Neither rule is right for every shop. What
matters is that the rule is known, that it cannot be bent by shouting, and that nobody waits for
ever. Those who write such programs learn that the average wait is a poor guide. Nobody lives
through an average. What people remember is the one morning when the queue did not move.

"You have let the fire go out," she said, without turning round.

"It went out by itself," he answered. "I only watched."

She laughed, though she did not want to. Outside the snow had stopped, and the light on the ceiling
had the blue colour that it takes on only a few mornings in a winter. He knelt down in front of the
stove, tore a page from last week's newspaper, and then began to read it.

"Is it interesting?" she asked after a while.

"They are going to build a railway to the lake."

"They have been going to build that railway since I was born. Light the fire, please."

He lit it. The page burned with a green edge, and for a moment the headline could still be read in
the ash, white on black, before it fell to pieces. They ate their breakfast in their coats. By noon
the first sledges came down from the upper farms, and it was plain that the road was open again and
that he would have to leave. Neither of them spoke of it. She cut the rest of the ham into thick
slices and wrapped them in a cloth, and he mended the latch on the kitchen door, which had been
broken since the autumn, and which he had always meant to mend.

The moon turns once on its axis in the time that it takes to go once round the earth. That is why
we always see the same side of it. It is not a coincidence. The pull of the earth raises a bulge in
the rock of the moon, as the moon raises tides in our oceans. Long ago, when the moon still turned
faster, that bulge was carried ahead, and the earth's pull on it acted like a brake. The turning
slowed until the bulge pointed straight at us, and there it has stayed. The same thing is happening
to the earth, but much more slowly: our days grow longer by about two thousandths of a second in
every century. In the age of the first corals a year had more than four hundred days, and the
growth lines of their skeletons, which add one fine ring each day, still say so.

To find the greatest common divisor of two numbers, divide the larger by the smaller and keep the
remainder. If the remainder is zero, the smaller number is the answer. Otherwise put the smaller
number in the place of the larger, and the remainder in the place of the smaller, and begin again.
For 252 and 105 the steps are these: 252 divided by 105 leaves 42; 105 divided by 42 leaves 21; 42
divided by 21 leaves nothing; so the answer is 21. The method always ends, because every remainder
is smaller than the one before and none is less than zero. It is also fast. The worst case is that
of two neighbouring Fibonacci numbers, where every quotient is one, and even there the number of
steps is at most five times the number of decimal digits of the smaller number.

In the reading room of the library there are thirty-two lamps with green shades, and at eleven in
the evening the porter turns them off one after another, starting at the windows. People pack their
things in that order too. The student in the corner, whose lamp is the last, has learned that this
gives her exactly nine minutes more than anybody else, and she saves the hardest page for them. She
is reading about the grammar of a language that was spoken on one side of a single mountain. It had
a special form of the verb for things that the speaker had not seen but had heard of from a person
who could be trusted. There was another form for things heard from people who could not be trusted,
and, the author notes, it was the more common of the two.
"""
