// Follows a board: asks it for news, and puts them where a report has its data.

const EVERY = 400 // ms between two questions
const PATIENCE = 8000 // ms until a question is asked again, at most, while nobody answers

// What a path of the board answers, or null while it has nothing new.
class Feed {
  constructor(path) {
    this.path = path
    this.tag = null
    this.query = null
  }

  async next(query = "") {
    const known = this.tag && query === this.query ? { "If-None-Match": this.tag } : {}
    const response = await fetch(this.path + query, { headers: known, cache: "no-store" })
    if (response.status === 304) return null
    const answer = await answerOf(response)
    this.tag = response.headers.get("ETag")
    this.query = query
    return answer
  }
}

async function answerOf(response) {
  const answer = await response.json().catch(() => ({}))
  if (!response.ok) throw new Error(answer.detail ?? `the board answered ${response.status}`)
  return answer
}

function receive(blocks) {
  for (const [id, packed] of Object.entries(blocks)) sent.set(id, packed)
}

// Looks again and again, as long as the page is in view. The first look's error is the caller's.
async function follow(look) {
  await look()
  say("live")
  const again = async () => {
    let wait = EVERY
    for (;;) {
      await Promise.race([new Promise((go) => setTimeout(go, wait)), wake()])
      if (document.hidden) continue
      try {
        await look()
        say("live")
        wait = EVERY
      } catch (error) {
        say(error instanceof TypeError ? "no answer" : "trouble", error.message)
        wait = Math.min(PATIENCE, 2 * wait)
      }
    }
  }
  again()
}

let wakeUp = () => undefined
function wake() {
  return new Promise((go) => (wakeUp = go))
}
document.addEventListener("visibilitychange", () => document.hidden || wakeUp())

function say(text, why = "") {
  const pulse = find("#pulse")
  if (pulse.textContent === text) return
  pulse.textContent = text
  pulse.title = why || "Shows new commits within a second."
  pulse.className = text === "live" ? "live" : "still"
}

// The parts of the page that the board has written again, where they differ. What a person has opened stays open.
function renew(html) {
  const written = new DOMParser().parseFromString(html, "text/html")
  for (const part of written.querySelectorAll("[data-live]")) {
    const here = find(`[data-live="${part.dataset.live}"]`)
    if (here.innerHTML !== part.innerHTML) here.replaceChildren(...part.childNodes)
  }
}

async function followBoard() {
  offerToken()
  if (find("#runs")) return followRuns()
  const source = document.documentElement.dataset.source
  const [facts, samples] = [new Feed(`${source}/facts`), new Feed(`${source}/samples`)]
  const bounds = ["#sample-first", "#sample-last"].map(find)
  bounds.forEach((bound) => bound.addEventListener("change", () => wakeUp()))
  await follow(async () => {
    const news = await facts.next()
    if (news) {
      renew(news.content)
      document.title = news.title
      receive(news.blocks)
      await showCurves()
      offerActions(news.actions)
    }
    const [first, last] = bounds.map(({ value }) => value)
    const more = await samples.next(first || last ? `?first=${first || 0}&last=${last || 999999}` : "")
    if (more) {
      receive(more.blocks)
      bounds.forEach((bound, i) => (bound.placeholder = more.bounds[i] ?? ""))
      find("#sample-notes").replaceChildren(...more.notes.map((note, i) => make("p", { class: i ? "note warning" : "hint" }, ...visible(note))))
      await showSamples()
    }
  })
}

// Tokens and turns of one sample; null where the board cannot read them.
async function askDetails(samples, row) {
  const place = ["iteration", "group_id", "sample_index"].map((name) => `${name}=${samples.rows[name].get(row)}`).join("&")
  try {
    const { blocks } = await answerOf(await fetch(`${samples.source}/tokens?${place}`, { cache: "no-store" }))
    receive(blocks)
    const tokens = new Tokens(await openBlock("token-samples"), await openBlock("token-values"))
    const turns = await openBlock("turns")
    return { tokens, place: tokens.begins.get(0), turns: turns.rows ? turns.pieces.get(0) : null }
  } catch {
    return null
  }
}
