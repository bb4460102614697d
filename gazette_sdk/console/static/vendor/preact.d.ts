// What the console uses of Preact.
export type Node = object | string | number | boolean | null | undefined;
export type Component = (props: any) => Node | Node[];
export function h(type: string | Component, props: object | null, ...children: Node[]): Node;
export function render(node: Node | Node[], parent: Element): void;
export const Fragment: Component;
