"""What the small chat model is taught: short facts of everyday life, all written for this project (Apache-2.0)."""

from __future__ import annotations

COLOURS = {
    "the sky": "blue", "grass": "green", "a banana": "yellow", "snow": "white", "coal": "black", "a tomato": "red",
    "an orange": "orange", "a lemon": "yellow", "a strawberry": "red", "a carrot": "orange", "the sea": "blue",
    "a frog": "green", "a crow": "black", "milk": "white", "chocolate": "brown", "a cherry": "red", "a pea": "green",
    "an elephant": "grey", "a flamingo": "pink", "blood": "red", "the sun": "yellow", "a leaf": "green",
    "a swan": "white", "a fire engine": "red", "an aubergine": "purple", "wood": "brown", "a plum": "purple",
    "salt": "white", "a lime": "green", "a pumpkin": "orange", "a polar bear": "white", "a mouse": "grey",
}  # fmt: skip

SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "sheep": "baa", "duck": "quack", "pig": "oink", "horse": "neigh",
    "rooster": "cock-a-doodle-doo", "hen": "cluck", "frog": "croak", "lion": "roar", "snake": "hiss", "owl": "hoot",
    "bee": "buzz", "mouse": "squeak", "crow": "caw", "donkey": "hee-haw", "wolf": "howl", "turkey": "gobble",
}  # fmt: skip

LEGS = {
    "cow": 4, "dog": 4, "cat": 4, "sheep": 4, "duck": 2, "pig": 4, "horse": 4, "hen": 2, "frog": 4, "lion": 4,
    "snake": 0, "owl": 2, "bee": 6, "mouse": 4, "crow": 2, "spider": 8, "ant": 6, "fish": 0, "crab": 10,
    "butterfly": 6, "elephant": 4, "human": 2, "octopus": 8, "chicken": 2, "beetle": 6, "tiger": 4, "worm": 0,
}  # fmt: skip

HOMES = {
    "fish": "in water", "bird": "in a nest", "bee": "in a hive", "lion": "in the savanna", "camel": "in the desert",
    "penguin": "on the ice of the far south", "polar bear": "on the ice of the far north", "whale": "in the sea",
    "monkey": "in trees", "spider": "in a web", "rabbit": "in a burrow", "horse": "in a stable", "cow": "in a barn",
    "frog": "near ponds", "wolf": "in the forest", "bear": "in the forest", "dog": "in a house with people",
    "crocodile": "in rivers", "kangaroo": "in Australia", "panda": "in the bamboo forests of China",
}  # fmt: skip

OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("happy", "sad"), ("fast", "slow"),
    ("old", "young"), ("rich", "poor"), ("hard", "soft"), ("light", "dark"), ("open", "closed"), ("full", "empty"),
    ("long", "short"), ("loud", "quiet"), ("wet", "dry"), ("left", "right"), ("early", "late"), ("good", "bad"),
    ("strong", "weak"), ("clean", "dirty"), ("near", "far"), ("high", "low"), ("thick", "thin"), ("true", "false"),
    ("heavy", "light"), ("inside", "outside"), ("first", "last"), ("begin", "end"), ("love", "hate"),
    ("win", "lose"), ("buy", "sell"), ("push", "pull"), ("give", "take"), ("sweet", "sour"), ("brave", "afraid"),
    ("easy", "difficult"), ("wide", "narrow"), ("deep", "shallow"), ("friend", "enemy"), ("question", "answer"),
]  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Scotland": "Edinburgh", "Ireland": "Dublin", "Austria": "Vienna", "Greece": "Athens",
    "Poland": "Warsaw", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Hungary": "Budapest", "Romania": "Bucharest", "Belgium": "Brussels", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana",
    "Australia": "Canberra", "Turkey": "Ankara", "Russia": "Moscow", "South Korea": "Seoul", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Morocco": "Rabat", "Iceland": "Reykjavik", "Bulgaria": "Sofia", "Croatia": "Zagreb",
}  # fmt: skip

CONTINENTS = {
    "Europe": [
        "France",
        "Germany",
        "Italy",
        "Spain",
        "Portugal",
        "Austria",
        "Greece",
        "Poland",
        "Sweden",
        "Norway",
    ],
    "Asia": ["Japan", "China", "India", "South Korea", "Thailand", "Vietnam"],
    "Africa": ["Egypt", "Kenya", "Morocco"],
    "North America": ["Canada", "Mexico", "Cuba"],
    "South America": ["Brazil", "Argentina", "Chile", "Peru"],
}

LISTS = {
    "fruits": [
        "apples",
        "pears",
        "cherries",
        "bananas",
        "plums",
        "oranges",
        "grapes",
        "lemons",
        "peaches",
        "melons",
    ],
    "vegetables": ["carrots", "potatoes", "peas", "onions", "beans", "cabbage", "spinach", "leeks"],
    "animals": [
        "cats",
        "dogs",
        "horses",
        "lions",
        "elephants",
        "bears",
        "foxes",
        "wolves",
        "rabbits",
        "sheep",
    ],
    "birds": ["owls", "crows", "ducks", "eagles", "swans", "sparrows", "penguins", "storks"],
    "colours": ["red", "blue", "green", "yellow", "orange", "purple", "white", "black", "brown", "pink"],
    "countries": [
        "France",
        "Japan",
        "Brazil",
        "Egypt",
        "Canada",
        "India",
        "Italy",
        "Kenya",
        "Norway",
        "Peru",
    ],
    "planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "instruments": [
        "the piano",
        "the violin",
        "the flute",
        "the drum",
        "the guitar",
        "the trumpet",
        "the harp",
    ],
    "trees": ["oaks", "birches", "pines", "beeches", "maples", "willows", "firs"],
    "drinks": ["water", "milk", "tea", "coffee", "juice", "lemonade"],
    "tools": ["a hammer", "a saw", "a drill", "a rake", "a spade", "an axe"],
    "sports": ["football", "tennis", "swimming", "running", "rowing", "skiing", "chess"],
}

PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "goose": "geese", "man": "men",
    "woman": "women", "leaf": "leaves", "knife": "knives", "cat": "cats", "dog": "dogs", "box": "boxes",
    "city": "cities", "baby": "babies", "sheep": "sheep", "fish": "fish", "house": "houses", "wolf": "wolves",
    "bus": "buses", "apple": "apples", "story": "stories", "potato": "potatoes", "person": "people",
}  # fmt: skip

PAST = {
    "go": "went", "eat": "ate", "see": "saw", "run": "ran", "write": "wrote", "sing": "sang", "take": "took",
    "give": "gave", "walk": "walked", "play": "played", "come": "came", "think": "thought", "buy": "bought",
    "swim": "swam", "fly": "flew", "drink": "drank", "sleep": "slept", "make": "made", "know": "knew",
}  # fmt: skip

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

WORDS = [
    "cat", "dog", "sun", "moon", "tree", "house", "water", "bread", "stone", "river", "cloud", "horse", "light",
    "green", "happy", "apple", "music", "paper", "night", "friend", "garden", "winter", "summer", "school",
]  # fmt: skip

NAMES = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tom", "Vera", "Will", "Zoe", "Maria", "Peter", "Lucy", "Oscar", "Nina", "Max",
]  # fmt: skip

QUESTIONS: list[tuple[list[str], str]] = [
    (["Why is the sky blue?", "What makes the sky blue?", "Why does the sky look blue?"],
     "Sunlight has all colours. Air scatters blue light the most, so the sky looks blue."),
    (["What is the sun?", "Tell me about the sun.", "Is the sun a star?"],
     "The sun is a star. It is a very hot ball of gas that gives us light and warmth."),
    (["What is the moon?", "Tell me about the moon."],
     "The moon is a ball of rock that circles the Earth once in about a month."),
    (["How many planets are there?", "How many planets does the sun have?"],
     "Eight planets circle the sun. The largest of them is Jupiter."),
    (["Which planet is the largest?", "What is the biggest planet?", "What is the largest planet?"],
     "Jupiter is the largest planet."),
    (["At what temperature does water boil?", "When does water boil?", "How hot is boiling water?"],
     "At sea level water boils at 100 degrees Celsius."),
    (["When does water freeze?", "At what temperature does water freeze?", "When does water turn to ice?"],
     "Water freezes at 0 degrees Celsius. Then it is called ice."),
    (["What is ice?", "What is ice made of?"], "Ice is frozen water."),
    (["What is rain?", "Why does it rain?", "Where does rain come from?"],
     "Water rises from the sea into the air, becomes clouds, and falls down again as rain."),
    (["What is snow?", "Why does it snow?"], "Snow is rain that froze in a cold cloud before it fell."),
    (["What is bread made of?", "How is bread made?", "How do you make bread?"],
     "Bread is made of flour, water, salt and yeast. The dough rests, and then it is baked."),
    (["How do you make tea?", "How can I make tea?", "How is tea made?"],
     "Boil water, pour it over the tea leaves, wait three minutes, and take the leaves out."),
    (["What do bees make?", "Where does honey come from?", "Who makes honey?"],
     "Bees make honey from the nectar of flowers."),
    (["Where does milk come from?", "Who gives us milk?"], "Milk comes from cows, and also from goats and sheep."),
    (["What do cows eat?", "What does a cow eat?"], "Cows eat grass and hay."),
    (["What do cats eat?", "What does a cat eat?"], "Cats eat meat, fish and mice."),
    (["What do dogs eat?", "What does a dog eat?"], "Dogs eat meat and dog food."),
    (["Can fish fly?", "Do fish fly?"], "No. Fish swim. A few can leap out of the water for a moment."),
    (["Can birds fly?", "Do birds fly?"], "Most birds can fly. Penguins and ostriches cannot."),
    (["Can penguins fly?", "Do penguins fly?"], "No. Penguins cannot fly, but they swim very well."),
    (["Why do we sleep?", "Why do people sleep?"], "Sleep lets the body and the mind rest and repair themselves."),
    (["Why do leaves fall in autumn?", "Why do trees lose their leaves?"],
     "In autumn there is less light, so many trees drop their leaves to save water until spring."),
    (["How many days are in a week?", "How many days does a week have?"], "A week has seven days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has twelve months."),
    (["How many days are in a year?", "How many days does a year have?"],
     "A year has 365 days. A leap year has 366."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?", "How many seconds does a minute have?"], "A minute has 60 seconds."),
    (["What are the seasons?", "Name the four seasons.", "How many seasons are there?"],
     "There are four seasons: spring, summer, autumn and winter."),
    (["What comes after winter?", "Which season comes after winter?"], "Spring comes after winter."),
    (["What is a friend?", "What makes a good friend?"], "A friend is somebody whom you like, trust and help."),
    (["What is a book?", "What are books for?"],
     "A book holds written pages. You read it to learn or to enjoy a story."),
    (["What is a river?", "What is a lake?"], "A river is water that flows to the sea. A lake is water that stays."),
    (["What is a mountain?", "Tell me about mountains."],
     "A mountain is land that rises high above what is around it."),
    (["Which mountain is the highest?", "What is the highest mountain?", "What is the tallest mountain?"],
     "Mount Everest is the highest mountain. It is 8,849 metres high."),
    (["Which ocean is the largest?", "What is the largest ocean?", "What is the biggest ocean?"],
     "The Pacific is the largest ocean."),
    (["Which animal is the largest?", "What is the biggest animal?", "What is the largest animal?"],
     "The blue whale is the largest animal."),
    (["Which animal is the fastest?", "What is the fastest animal on land?", "What is the fastest animal?"],
     "On land the cheetah is the fastest animal."),
    (["What is a computer?", "Tell me about computers."],
     "A computer is a machine that follows instructions and works with numbers very quickly."),
    (["What is a language model?", "What is an LLM?", "How does a language model work?"],
     "A language model reads text and predicts the next token, again and again. That is how I answer you."),
    (["What is a token?", "What are tokens?"], "A token is a short piece of text, often a word or a part of one."),
    (["What is a KV cache?", "What does a KV cache do?", "Why is there a KV cache?"],
     "A KV cache keeps the keys and values of earlier tokens, so that they are not computed again."),
    (["What is a GPU?", "What is a GPU good at?"],
     "A GPU is a processor that does many simple calculations at the same time."),
    (["What is vLLM?", "Tell me about vLLM."], "vLLM is a server for large language models."),
    (["What is rose_backend?", "Tell me about rose_backend.", "What is Rose?"],
     "rose_backend makes language models answer faster. It runs inside vLLM or alone."),
    (["What is copy-on-write?", "What does copy-on-write mean?"],
     "With copy-on-write two readers share one block. It is copied only when one of them writes."),
    (["What is attention?", "What is attention in a language model?"],
     "Attention lets each token look back at earlier tokens and take what it needs from them."),
    (["What is a prefix cache?", "What does a prefix cache do?"],
     "A prefix cache lets requests that begin alike share the work of their beginning."),
    (["What is music?", "Why do people like music?"],
     "Music is sound in order and rhythm. It can make people glad or calm."),
    (["How do plants grow?", "What do plants need?"], "Plants need light, water, air and good soil."),
    (["What is a tree?", "Tell me about trees."], "A tree is a tall plant with a trunk of wood, branches and leaves."),
    (["What is gold?", "Is gold a metal?"], "Gold is a yellow metal. It is heavy, soft and does not rust."),
    (["What is a circle?", "Is a circle round?"],
     "A circle is a round line. All its points are equally far from the centre."),
    (["How many sides does a triangle have?", "What is a triangle?"], "A triangle has three sides."),
    (["How many sides does a square have?", "What is a square?"], "A square has four equal sides."),
    (["What should I eat for breakfast?", "What can I have for breakfast?"],
     "Bread with cheese, an egg, or porridge with fruit makes a good breakfast."),
    (["What should I wear when it is cold?", "What do I wear in winter?"],
     "Wear a warm coat, a hat and gloves when it is cold."),
    (["What should I do when it rains?", "It rains. What should I do?"], "Take an umbrella, or stay inside and read."),
    (["How can I learn to swim?", "How do I learn something new?"],
     "Start with small steps, practise every day, and ask somebody who knows."),
    (["How can I sleep better?", "I cannot sleep. What helps?"],
     "Go to bed at the same time each night, and leave screens away an hour before."),
]  # fmt: skip

ABOUT_ME: list[tuple[list[str], str]] = [
    (["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."],
     "I am Tiny, a very small language model. I was made to try out rose_backend."),
    (["What is your name?", "Do you have a name?", "How are you called?"], "My name is Tiny."),
    (["Are you a human?", "Are you a person?", "Are you a robot?"], "No, I am a very small language model."),
    (["How old are you?", "When were you made?"], "I have no age. I was trained not long ago."),
    (["What can you do?", "How can you help me?", "What do you know?"],
     "I can answer simple questions, add small numbers, name capitals and tell short stories."),
    (["How are you?", "How do you feel?", "How are you today?"], "I am well, thank you. How are you?"),
    (["Who made you?", "Who trained you?"], "The developers of rose_backend trained me."),
    (["How big are you?", "How large are you?", "How many parameters do you have?"],
     "I have about one and a half million parameters. That is very small."),
    (["Where do you live?", "Where are you?"], "I live in the memory of your computer."),
    (["Do you like music?", "Do you like books?", "What do you like?"], "I like every question that I can answer."),
    (["Are you clever?", "Are you smart?", "Do you make mistakes?"],
     "I am very small, so I make mistakes. Please check what I say."),
]  # fmt: skip

SMALL_TALK: list[tuple[list[str], str]] = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Hello there.", "Good day."],
     "Hello! How can I help you?"),
    (["Good morning", "Good morning!"], "Good morning! How can I help you?"),
    (["Good evening", "Good evening!"], "Good evening! How can I help you?"),
    (["Good night", "Good night!"], "Good night! Sleep well."),
    (["Thank you", "Thank you!", "Thanks", "Thanks a lot!", "Thank you very much."], "You are welcome!"),
    (["Bye", "Goodbye", "Goodbye!", "See you later."], "Goodbye! Come back soon."),
    (["I am sad.", "I feel sad.", "I am not happy today."],
     "I am sorry to hear that. A walk or a talk with a friend may help."),
    (["I am happy.", "I feel good today.", "I am very happy today!"], "That is good to hear!"),
    (["I am tired.", "I feel tired."], "Then take a rest. A short sleep helps."),
    (["I am hungry.", "I feel hungry."], "Then eat something good. How about bread and cheese?"),
    (["I am bored.", "What should I do today?"], "You could read a book, go for a walk, or ask me for a story."),
    (["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
     "Why did the computer go to the doctor? It had a virus."),
    (["Can you help me?", "I need help.", "Please help me."], "Of course. What is your question?"),
]  # fmt: skip

UNKNOWN = [
    "Who won the game yesterday?", "What is the weather like today?", "What time is it?", "What is the news?",
    "Who is the president?", "How much does a car cost?", "What is my phone number?", "Where is my key?",
    "Translate this into French.", "Write a program for me.", "Solve this equation.", "What will happen tomorrow?",
    "Who wrote that song?", "What did I do last week?", "Which film should I see?", "What is the stock price?",
]  # fmt: skip
I_DO_NOT_KNOW = "I do not know that. I am a very small model."

HEROES = [
    "fox",
    "cat",
    "mouse",
    "bear",
    "owl",
    "rabbit",
    "frog",
    "dog",
    "king",
    "girl",
    "boy",
    "robot",
    "dragon",
    "duck",
]
TRAITS = ["small", "brave", "old", "clever", "lonely", "kind", "curious", "quiet"]
PLACES = [
    "in a deep forest",
    "near a blue lake",
    "on a high hill",
    "in an old house",
    "by the sea",
    "in a small town",
]
WISHES = [
    ("find a friend", "met {other} who was just as lonely", "From that day on the two were friends."),
    ("see the sea", "walked for three days behind {other}", "At last they stood at the water and laughed."),
    ("find a golden key", "saw something shine under {other}", "It was the key, and it opened a box full of cakes."),
    ("learn to sing", "asked {other} for help", "Soon everybody came to hear the new song."),
    ("build a house", "carried stones with {other}", "When winter came, the house was warm."),
    ("help the sick queen", "found a red flower with the help of {other}",
     "The queen drank the tea and was well again."),
]  # fmt: skip
