// Opens the blocks that a report brings along, or that a board has sent: see flows/report/blocks.py for how they are
// packed.

const sent = new Map() // blocks from a board, by id

const KINDS = { f32: Float32Array, f64: Float64Array, i32: Int32Array, u8: Uint8Array, i16: Int16Array }
const UNKNOWN = -32768
const LETTERS = new TextDecoder()

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text)
  const letters = atob(text)
  const bytes = new Uint8Array(letters.length)
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i)
  return bytes
}

// The block of an element, as an object of columns; the element is given up. A column has `length` and `get(row)`.
async function openBlock(id) {
  const element = document.getElementById(`data-${id}`)
  const packed = fromBase64(sent.get(id) ?? element.textContent)
  element?.remove()
  sent.delete(id)
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))
  const buffer = await new Response(unpacked).arrayBuffer()
  const size = new DataView(buffer).getUint32(0, true)
  const header = JSON.parse(LETTERS.decode(new Uint8Array(buffer, 4, size)))
  const block = { rows: header.rows }
  for (const column of header.columns) block[column.name] = openColumn(buffer, 4 + size + column.at, column, header.rows)
  return block
}

function openColumn(buffer, at, { kind, bytes, scale, words, value }, rows) {
  if (kind === "json") return value
  if (kind === "text") {
    const ends = new Uint32Array(buffer, at, rows + 1)
    const letters = new Uint8Array(buffer, at + 4 * (rows + 1), bytes - 4 * (rows + 1))
    return { length: rows, get: (row) => LETTERS.decode(letters.subarray(ends[row], ends[row + 1])) }
  }
  if (kind === "words") {
    const codes = new Int32Array(buffer, at, rows)
    return { length: rows, codes, words, get: (row) => (codes[row] < 0 ? null : words[codes[row]]) }
  }
  const values = new KINDS[kind](buffer, at, rows)
  if (kind === "i16") {
    return { length: rows, values, get: (row) => (values[row] === UNKNOWN ? NaN : values[row] * scale) }
  }
  return { length: rows, values, get: (row) => values[row] }
}

// A long column of texts that lies in several blocks, which are opened one after the other.
class LongText {
  constructor(name, count) {
    this.name = name
    this.count = count
    this.blocks = []
    this.ready = false
  }

  async open() {
    for (let i = 0; i < this.count; i++) {
      this.blocks.push(await openBlock(`${this.name}-${i}`))
      await nextTurn()
    }
    this.ready = true
  }

  get(row) {
    const block = this.blocks.findLast((one) => one.first <= row)
    return block && row < block.first + block.rows ? block.text.get(row - block.first) : ""
  }
}

// Gives the browser a moment to draw and to listen.
function nextTurn() {
  return new Promise((go) => setTimeout(go))
}
